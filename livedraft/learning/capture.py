"""From the engine to the store without ever making it wait: a bounded queue and one writer thread."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from livedraft.events import Events
from livedraft.learning.store import TraceStore
from livedraft.records import Trace

logger = logging.getLogger("livedraft")

QUEUE_SIZE = 256
TRACES_PER_SHARD = 8
MAX_WAIT_SECONDS = 0.5
"""A shard is written when it has TRACES_PER_SHARD traces, or this long after its first."""


class Capture:
    """`offer` is the engine's trace sink: it never blocks, and counts what it drops when the writer falls behind."""

    def __init__(
        self, store: TraceStore, events: Events, redact: Callable[[Trace], Trace | None] = lambda trace: trace
    ) -> None:
        """`redact` gives what may be kept of a trace, on the writer's thread."""
        self._store = store
        self._redact = redact
        self.num_redacted = 0
        """Traces of which something or all was not kept."""
        self._events = events
        self._queue: queue.Queue[Trace | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_until_closed, name="trace-writer", daemon=True)
        self._thread.start()

    def offer(self, trace: Trace) -> None:
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued and stop."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
        self._thread.join(timeout)

    def _write_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch: list[Trace] = []
            deadline = float("inf")
            while len(batch) < TRACES_PER_SHARD:
                try:
                    wait = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
                    trace = self._queue.get(timeout=wait)
                except queue.Empty:
                    break
                if trace is None:
                    is_open = False
                    break
                if not batch:
                    deadline = time.monotonic() + MAX_WAIT_SECONDS
                batch.append(trace)
            if batch:
                self._write(batch)

    def _allowed(self, trace: Trace) -> Trace | None:
        """What fails to be looked at is not kept."""
        try:
            allowed = self._redact(trace)
        except Exception as error:
            self.num_dropped += 1
            self._events.emit("redaction_failed", reason=type(error).__name__)  # its text may quote the prompt
            return None
        self.num_redacted += allowed is not trace
        return allowed

    def _write(self, batch: list[Trace]) -> None:
        batch = [allowed for trace in batch if (allowed := self._allowed(trace)) is not None]
        if not batch:
            return
        try:
            self._store.append(batch)
        except Exception as error:  # a full disk must not end serving, and the writer must outlive one bad trace
            self.num_dropped += len(batch)
            self._events.emit("traces_dropped", num_traces=len(batch), total=self.num_dropped, reason=str(error))


def conversation_key(root: Sequence[Any], secret: bytes) -> str:
    """Keyed hash of a conversation's root (its system and first user message, or the whole prompt): every turn and
    repeat of it falls on the same side of the held-out split, and the text cannot be guessed from it."""
    return hashlib.blake2b(repr(list(root)).encode(), key=secret, digest_size=16).hexdigest()


def load_secret(state: Path) -> bytes:
    """The state's own key, made once."""
    path = state / "split.key"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        secret = os.urandom(32)
        write_secret(state, secret)
        return secret


def write_secret(state: Path, secret: bytes) -> None:
    state.mkdir(parents=True, exist_ok=True)
    temporary = state / ".split.key.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
    os.replace(temporary, state / "split.key")
