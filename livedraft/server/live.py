"""What the dashboard shows: a sample of the server every second, kept as `History`, sent to whoever looks as server-sent
events.

    history    all points, at first and whenever the reader has missed some
    details    versions, decisions, learning; when they have changed
    now        every second: the newest point, rates, requests, draft lengths

Reading is as open as /metrics, so nothing here names a client or a request, and words of an exception stay behind the admin
key (`/admin/events`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from livedraft import __version__, operations
from livedraft.config import ServerConfig
from livedraft.drafts.database import MAX_EVENTS, read_events
from livedraft.drafts.registry import Registry
from livedraft.events import Event, described
from livedraft.records import UserError
from livedraft.server.errors import ApiError
from livedraft.server.history import MAX_CURVES, History, Point
from livedraft.server.openai_api import Served
from livedraft.speculation.prediction import VERSION as PREDICTION
from livedraft.speculation.suffix import VERSION as SUFFIX

logger = logging.getLogger("livedraft")
SAMPLE_SECONDS = 1.0
_DETAIL_TICKS, _DETAIL_TICKS_UNWATCHED = 2, 10
"""Samples from one look at the state folder to the next, with and without somebody watching."""
_SAVE_SECONDS = 30.0
_FULL_TICKS = 300
"""A reader's copy only grows; so often it gets the shortened one."""
MAX_VIEWERS = 32
_RECENT_DRAFTED, _RECENT_SECONDS = 400, 30.0
"""How far back the headline figures reach: to the nearer of the two, in drafted tokens and in seconds with work."""
_LATENCY_SECONDS, _MAX_LATENCIES = 300.0, 4096
_NUM_EVENTS, _NUM_MARKS, _NUM_VERSIONS = 30, 200, 30
_OWN_WORDS = frozenset({"candidate_passed", "candidate_rejected", "earlier_draft_again", "training_restarted"})
"""Events whose reason is a sentence of ours; others quote exceptions, which may name files."""


class Latencies:
    """Percentiles of what was seen lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_MAX_LATENCIES)

    def add(self, seconds: float) -> None:
        self._seen.append((time.monotonic(), seconds))

    def percentiles(self) -> dict[str, float] | None:
        """p50, p95 and p99 in seconds of the last minutes; None when there was nothing."""
        since = time.monotonic() - _LATENCY_SECONDS
        while self._seen and self._seen[0][0] < since:
            self._seen.popleft()
        values = sorted(seconds for _, seconds in self._seen)
        if not values:
            return None
        return {f"p{q}": values[max(0, math.ceil(q / 100 * len(values)) - 1)] for q in (50, 95, 99)}


class Live:
    """Runs on the event loop; what reads the state folder runs in a thread."""

    def __init__(self, config: ServerConfig, served: Callable[[], Served | None], phase: Callable[[], str]) -> None:
        self._config, self._served, self._phase = config, served, phase
        self.time_to_first_token = Latencies()
        self.inter_token_latency = Latencies()
        self.history = History()
        self.details: dict[str, Any] = {}
        self.num_viewers = 0
        self._decisions = Decisions()
        self._sampler: Sampler | None = None
        self._point: Point | None = None
        """The newest one, if the last sample made one."""
        self._tick = 0
        self._said: tuple[int, dict[str, Any]] | None = None
        self._ticked = asyncio.Event()
        self._saved_at = time.monotonic()
        self._has_news = False
        self._problem = ""

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._sample()
            except Exception as error:  # the page's trouble must not end the page
                problem = f"{type(error).__name__}: {error}"
                if problem != self._problem:
                    logger.exception("The dashboard could not be brought up to date.")
                self._problem = problem
            self._tick += 1
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _sample(self) -> None:
        served = self._served()
        if served is None:
            return
        if self._sampler is None:
            if served.state is not None:
                self.history = await run_in_threadpool(History.load, served.state)
                self._tick += 1  # whoever looks already has missed something
            self._sampler = Sampler(served.backend.snapshot())
        if self._tick % (_DETAIL_TICKS if self.num_viewers else _DETAIL_TICKS_UNWATCHED) == 0 or not self.details:
            self.details = await run_in_threadpool(self._read_details, served)
        learning = self.details["learning"]
        point = self._sampler.point(served.backend.snapshot(), learning.get("alpha_last_100"), learning.get("loss"))
        self._point = point
        if point is not None:
            self.history.add(point)
            self._has_news = True
        if time.monotonic() - self._saved_at > _SAVE_SECONDS:
            await self.save()

    async def save(self) -> None:
        served = self._served()
        self._saved_at = time.monotonic()
        if self._has_news and served is not None and served.state is not None:
            self._has_news = False
            rows = [asdict(point) for point in self.history.points]
            await run_in_threadpool(History.save, served.state, rows)

    def _read_details(self, served: Served) -> dict[str, Any]:
        """Everything that changes seldom. The state folder's database may be busy: then as it was."""
        details = {
            "server": f"livedraft {__version__}",
            "model": served.name,
            "max_model_len": served.backend.max_model_len,
            "needs_api_key": bool(self._config.api_keys),
            "has_admin_key": self._config.admin_key is not None,
            "keeps_state": served.state is not None,
        }
        state = served.state
        try:
            learning = served.learning()
            if state is None:
                return details | {"learning": {"enabled": 0.0}, "versions": [], "events": [], "marks": []}
            status = operations.learning_status(state)
            trainer = status.pop("trainer") if learning.get("enabled") else {}
            status.pop("serving")
            trainer.pop("last_problem", None)
            self._decisions.read(state)
            return details | {
                "learning": status | trainer | learning,
                "versions": _versions(state),
                "events": list(self._decisions.sentences),
                "marks": list(self._decisions.marks),
            }
        except UserError:
            return self.details or details | {"learning": {"enabled": 0.0}, "versions": [], "events": [], "marks": []}

    # --- readers ----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events for one reader, until it leaves or the server drains."""
        self.num_viewers += 1
        try:
            yield "retry: 2000\n\n"
            sent_tick, full_tick, sent_details = -1, 0, ""
            while self._phase() in ("loading", "ready"):
                is_full = sent_tick < 0 or self._tick > sent_tick + 1 or self._tick - full_tick >= _FULL_TICKS
                if is_full:
                    full_tick = self._tick
                    yield _event("history", [point.as_json() for point in self.history.points])
                details = json.dumps(self.details, separators=(",", ":"))
                if self.details and details != sent_details:
                    sent_details = details
                    yield f"event: details\ndata: {details}\n\n"
                sent_tick = self._tick
                yield _event(
                    "now", self._now() | {"point": None if is_full or self._point is None else self._point.as_json()}
                )
                await self._ticked.wait()
        finally:
            self.num_viewers -= 1

    def require_place(self) -> None:
        """Raises ApiError when too many are looking already."""
        if self.num_viewers >= MAX_VIEWERS:
            raise ApiError(503, f"{MAX_VIEWERS} dashboards are open; close one.", retry_after_seconds=10)

    def _now(self) -> dict[str, Any]:
        """Worked out once a sample, for all readers."""
        if self._said is None or self._said[0] != self._tick:
            self._said = (self._tick, self._current())
        return self._said[1]

    def _current(self) -> dict[str, Any]:
        served = self._served()
        said: dict[str, Any] = {"time": round(time.time(), 3), "phase": self._phase()}
        if served is None:
            return said
        snapshot = served.backend.snapshot()
        return said | {
            "recent": _rates(self.history.recent(_RECENT_DRAFTED, _RECENT_SECONDS)),
            "draft_version": snapshot["draft_version"],
            "drafts": snapshot.get("drafts", []),
            "requests": {
                "running": snapshot["num_requests_running"],
                "waiting": snapshot["num_requests_waiting"],
                "slots": snapshot["num_slots"],
                "kv_cache_usage": snapshot["kv_cache_usage_perc"],
                "finished": sum(snapshot["finished"].values()),
                "failed": snapshot["finished"].get("error", 0),
                "time_to_first_token": self.time_to_first_token.percentiles(),
                "inter_token_latency": self.inter_token_latency.percentiles(),
            },
        }


class Sampler:
    """From a backend's growing counters to what happened between two looks."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._before = _counters(snapshot)
        self._looked_at = time.time()
        self._gauges: tuple[float | None, float | None] = (None, None)

    def point(self, snapshot: dict[str, Any], alpha: float | None, loss: float | None) -> Point | None:
        """None when nothing happened."""
        now, before = _counters(snapshot), self._before
        start, end = self._looked_at, max(time.time(), self._looked_at)
        is_same = now["tokens"] == before["tokens"] and (alpha, loss) == self._gauges
        self._before, self._looked_at, self._gauges = now, end, (alpha, loss)
        if is_same:
            return None
        curves: dict[str, list[int]] = {}
        for name, counts in now["curves"].items():
            grown = [a - b for a, b in zip(counts, before["curves"].get(name, [0, 0, 0]), strict=True)]
            if any(grown):
                curves[name] = grown
        return Point(
            start=start,
            end=end,
            busy_seconds=now["busy"] - before["busy"],
            num_tokens=now["tokens"] - before["tokens"],
            estimated_seconds=now["estimated"] - before["estimated"],
            estimated_plain_seconds=now["plain"] - before["plain"],
            curves=curves,
            alpha=alpha,
            loss=loss,
        )


def _counters(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A backend that does not time its rounds has no tokens a second here, and no estimate."""
    curves: dict[str, list[int]] = {}
    for (route, version), stats in snapshot["speculation"]:
        name = version if version in (SUFFIX, PREDICTION) else route
        if name not in curves and len(curves) >= MAX_CURVES:
            continue
        counts = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
        curves[name] = [a + b for a, b in zip(curves.get(name, [0, 0, 0]), counts, strict=True)]
    return {
        "tokens": snapshot.get("num_emitted_tokens", snapshot["generation_tokens"]),
        "busy": snapshot.get("busy_seconds", 0.0),
        "estimated": snapshot.get("estimated_seconds", 0.0),
        "plain": snapshot.get("estimated_plain_seconds", 0.0),
        "curves": curves,
    }


def _rates(recent: Point | None) -> dict[str, Any] | None:
    """The headline figures; acceptance is that of all proposals together."""
    if recent is None:
        return None
    num_rounds, num_drafted, num_accepted = (
        sum(counts[index] for counts in recent.curves.values()) for index in range(3)
    )
    speed = recent.num_tokens / recent.busy_seconds if recent.busy_seconds else None
    estimated = recent.estimated_plain_seconds / recent.estimated_seconds if recent.estimated_seconds else None
    return {
        "ended_at": round(recent.end, 3),
        "acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "mean_acceptance_length": 1 + num_accepted / num_rounds if num_rounds else None,
        "tokens_per_second": speed,
        "estimated_speedup": estimated,
        "estimated_plain_tokens_per_second": speed / estimated if speed and estimated else None,
    }


class Decisions:
    """Events of the state folder as sentences, and those that belong on the curve. Each is read once."""

    def __init__(self) -> None:
        self.sentences: deque[dict[str, Any]] = deque(maxlen=_NUM_EVENTS)
        self.marks: deque[dict[str, Any]] = deque(maxlen=_NUM_MARKS)
        self._last_id = 0
        self._last_return = ("", "")
        """(the version that left, the one that came back) of the last roll-back: its swap is no promotion."""

    def read(self, state: Path) -> None:
        """Raises UserError as the database."""
        self.take(read_events(state, after_id=self._last_id, limit=MAX_EVENTS))

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._last_id = max(self._last_id, event["id"])
            if "request" in event:
                continue
            sentence = described(_publishable(event))
            self.sentences.append({"time": event["time"], "event": event["event"], "sentence": sentence})
            kind = self._kind(event)
            if kind is not None:
                self.marks.append({"time": event["time"], "kind": kind, "sentence": sentence})

    def _kind(self, event: Event) -> str | None:
        name, version, previous = event["event"], event.get("version"), event.get("previous")
        if name in ("draft_rolled_back", "rolled_back_by_operator"):
            self._last_return = (str(version), str(previous))
            return "rollback"
        if name == "draft_swapped" and (str(previous), str(version)) != self._last_return:
            return "promotion"
        return "rejection" if name == "candidate_rejected" else None


def _publishable(event: Event) -> Event:
    if event["event"] in _OWN_WORDS:
        return event
    hidden = {name: "(see /admin/events)" for name in ("reason", "last_words") if name in event}
    return event | hidden


def _versions(state: Path) -> list[dict[str, Any]]:
    """The newest first, and whatever serves."""
    rows = operations.list_drafts(state)
    registry = Registry(state)
    shown = [
        row
        for index, row in enumerate(rows)
        if index >= len(rows) - _NUM_VERSIONS or row["status"] in ("in_service", "canary")
    ]
    return [row | {"can_serve": registry.weights_path(row["id"]).exists()} for row in reversed(shown)]


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
