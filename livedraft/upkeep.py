"""What the serving process does for its state folder beside serving: tidy up at start, heed an operator's deletions, keep the
store within its limits, report what serving has used, keep the events.

`look` runs several times a second on the swap watcher's thread, never on the engine's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from livedraft.config import LearningConfig
from livedraft.drafts.database import read_controls, record_events, set_damaged_database_aside, write_status
from livedraft.drafts.registry import Registry
from livedraft.events import Event, Events
from livedraft.learning.process import CHECKPOINTS
from livedraft.learning.store import Streams, TraceStore
from livedraft.records import UserError
from livedraft.speculation.suffix import Traffic

_REPORT_SECONDS, _LIMIT_SECONDS = 2.0, 30.0
"""How often status is written, and how often the store's limits are looked at."""
_CLOCK_SECONDS = 60.0
"""The wall clock moved by more than this against the monotonic one: somebody set it."""
_CLOCK_GRACE_SECONDS = 3600.0
"""After that nothing is deleted for its age for this long: a wrong clock would make every trace a hundred years old."""
_LOOK_SECONDS = 0.5
_MAX_WAITING_EVENTS = 1000
_BREATH_SECONDS = 0.001
"""Between two texts that are read at start: the engine's thread is serving meanwhile."""


class Upkeep:
    def __init__(self, state: Path, *, config: LearningConfig, events: Events) -> None:
        """Tidies up what a crash left behind; the caller owns the folder's lock. Raises UserError as the database."""
        self._state, self._config, self._events = state, config, events
        self._store = TraceStore(state)
        self._waiting_events: deque[Event] = deque(maxlen=_MAX_WAITING_EVENTS)
        events.subscribe(self._waiting_events.append)
        self._closing = threading.Event()
        self._forget_prefixes: Callable[[], None] = lambda: None
        self._report: Callable[[], dict[str, Any]] = dict
        self._save: Callable[[], None] = lambda: None
        self._reported_at = self._limited_at = 0.0
        self._clock_offset = time.time() - time.monotonic()
        self._no_ageing_until = 0.0
        self._tidy_up()
        self._forget_seen = read_controls(state)["forget"]

    def _tidy_up(self) -> None:
        aside = set_damaged_database_aside(self._state)
        if aside is not None:
            # Rows get other numbers in the new one, and the trainer's checkpoint knows traces by theirs.
            for checkpoint in self._state.glob(CHECKPOINTS):
                checkpoint.unlink(missing_ok=True)
            self._events.emit("database_damaged", kept_as=aside.name)
        versions, traces = Registry(self._state).reconcile(), self._store.reconcile()
        if versions:
            self._events.emit("versions_found", versions=versions)
        if traces:
            self._events.emit("traces_found", num_traces=traces)
        self._say_what_was_set_aside(self._store)

    def start(
        self,
        *,
        forget_prefixes: Callable[[], None],
        report: Callable[[], dict[str, Any]],
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """The engine is there: `report` says what serving has used; `save` keeps what else should outlive the process, and
        raises UserError when it cannot."""
        self._forget_prefixes, self._report, self._save = forget_prefixes, report, save

    def read_texts(self, streams: Streams, texts: Traffic, most_tokens: int) -> Traffic | None:
        """What the newest traces of some streams said, for suffixes; the oldest of them first. Held-out ones are left out. None
        when something was deleted meanwhile. From any thread."""
        store, forgotten = TraceStore(self._state), read_controls(self._state)["forget"]
        rows, num_tokens = [], 0
        for row in reversed(store.rows(streams=streams, limit=-1)):
            if num_tokens > most_tokens:
                break
            if not row.is_held_out and (trace := store.read(row)) is not None:
                token_ids = [*trace.prompt_token_ids, *trace.output_token_ids]
                rows.append((token_ids, trace.client_key, trace.arrived_at))
                num_tokens += len(token_ids)
            time.sleep(_BREATH_SECONDS)
        self._say_what_was_set_aside(store)
        for token_ids, client_key, at in reversed(rows):
            texts.add(token_ids, client_key, at=at)
            time.sleep(_BREATH_SECONDS)
        return texts if read_controls(self._state)["forget"] == forgotten else None

    def _say_what_was_set_aside(self, store: TraceStore) -> None:
        if store.num_set_aside:
            self._events.emit("shards_set_aside", num_shards=store.num_set_aside)

    def look_now_and_then(self) -> None:
        """On a thread of its own, where no swap watcher does it."""

        def run() -> None:
            while not self._closing.wait(_LOOK_SECONDS):
                try:
                    self.look()
                except UserError as error:
                    self._events.emit("swap_failed", reason=str(error))

        threading.Thread(target=run, name="livedraft-upkeep", daemon=True).start()

    def close(self) -> None:
        """No more looks of its own."""
        self._closing.set()

    def look(self) -> None:
        """Raises UserError when the database cannot be used just now; the next look tries again."""
        self._watch_clock()
        controls = read_controls(self._state)
        if controls["forget"] != self._forget_seen:
            self._forget_seen = controls["forget"]
            self._forget_prefixes()
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            write_status(self._state, "serving", self._report())
        if now - self._limited_at > _LIMIT_SECONDS:
            self._limited_at = now
            self._enforce_limits(now)
            self._save()
        self.keep_events()

    def _watch_clock(self) -> None:
        offset = time.time() - time.monotonic()
        moved, self._clock_offset = offset - self._clock_offset, offset
        if abs(moved) > _CLOCK_SECONDS:
            self._no_ageing_until = time.monotonic() + _CLOCK_GRACE_SECONDS
            self._events.emit("clock_jumped", seconds=round(moved))

    def _enforce_limits(self, now: float) -> None:
        max_age = self._config.max_trace_age_days * 86400 if now >= self._no_ageing_until else float("inf")
        removed = self._store.enforce_limits(max_bytes=self._config.max_store_gb * 2**30, max_age_seconds=max_age)
        if removed:
            self._events.emit("traces_expired", num_traces=removed)

    def keep_events(self) -> None:
        """On disk, for the command line and whoever comes later; those that cannot be written now wait."""
        waiting = [self._waiting_events.popleft() for _ in range(len(self._waiting_events))]
        try:
            record_events(self._state, waiting)
        except UserError:
            self._waiting_events.extendleft(reversed(waiting))
