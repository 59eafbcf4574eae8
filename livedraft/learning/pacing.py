"""When training gives way to serving, and how long it ran itself.

Serving raises a flag in shared memory while requests run or wait (`process.py`). Between two micro-batches the trainer looks at
it and steps aside for a while; and while requests come at all, less is done at a time, by the level of the settings.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from livedraft.learning.memory import MAX_EVIDENCE
from livedraft.learning.process import open_yield_flag

BUSY_PAUSE_SECONDS = {"gentle": 0.2 if hasattr(os, "SCHED_IDLE") else 10.0, "on": 0.5, "eager": 0.0}
"""Longest pause between two micro-batches while serving is busy, by level: learning starves on no machine, but costs little.
Where the system has an idle priority the trainer runs when nobody else wants the core, and a long pause only wastes that."""
SCORED_WHILE_BUSY = {"gentle": 8, "on": 1, "eager": 1}
"""While requests come, one new trace in so many is scored, by level: what serving can spare goes into learning. The others
teach all the same; the gate scores its evidence itself."""
EVIDENCE_WHILE_BUSY = {"gentle": 64, "on": MAX_EVIDENCE, "eager": MAX_EVIDENCE}
"""Requests that the gate asks about: scoring hundreds under two versions costs as much as hundreds of requests trained on."""
LIVELY_SECONDS = 5.0
"""For so long after one was seen running, requests come."""


class Pacing:
    """Of one worker. `has_had_its_share`: must training wait for more traffic? Asked with the seconds since requests were last
    seen running."""

    def __init__(self, state: Path, level: str, has_had_its_share: Callable[[float], bool]) -> None:
        self.level = level
        self.train_seconds = 0.0
        """Spent in steps and scores, pauses for serving not counted."""
        self.is_resting = False
        """Training has had its share: nothing is due before serving's figures move on."""
        self._yield_flag = open_yield_flag(state)
        self._has_had_its_share = has_had_its_share
        self._busy_at = -math.inf
        """When requests were last seen running."""
        self._paused_seconds, self._paused_until = 0.0, -math.inf
        self._pausing = threading.Lock()

    def seconds_since_busy(self) -> float:
        """Since requests were last seen running."""
        if self._yield_flag[0]:
            self._busy_at = time.monotonic()
        return time.monotonic() - self._busy_at

    @property
    def is_lively(self) -> bool:
        """Requests come."""
        return self.seconds_since_busy() < LIVELY_SECONDS

    @property
    def scored_of(self) -> int:
        """One new trace in so many is scored now."""
        return SCORED_WHILE_BUSY[self.level] if self.is_lively else 1

    @property
    def most_evidence(self) -> int:
        """Requests that the gate asks about now."""
        return EVIDENCE_WHILE_BUSY[self.level] if self.is_lively else MAX_EVIDENCE

    def rests(self) -> bool:
        """While requests come training may take a share of what serving takes, and no more."""
        self.is_resting = self._has_had_its_share(self.seconds_since_busy())
        return self.is_resting

    def step_aside(self) -> None:
        """Between micro-batches: while requests run or wait."""
        started = time.monotonic()
        longest = BUSY_PAUSE_SECONDS[self.level]
        if self._yield_flag[0]:
            self._busy_at = started
        while self._yield_flag[0] and time.monotonic() < started + longest:
            time.sleep(0.01)
        with self._pausing:  # lanes pause together: what two of them waited through counts once
            now = time.monotonic()
            self._paused_seconds += max(0.0, now - max(started, self._paused_until))
            self._paused_until = now

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What runs inside is training's own time."""
        started, paused = time.monotonic(), self._paused_seconds
        yield
        self.train_seconds += time.monotonic() - started - (self._paused_seconds - paused)
