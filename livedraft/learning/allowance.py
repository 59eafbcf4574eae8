"""How much training may take while requests come: at level `gentle`, a share of what serving itself takes.

Idle compute is free. When nobody has asked for `AWAY_SECONDS` the account is closed, and the next request opens another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from livedraft.drafts.database import read_status

SHARES: dict[str, float | None] = {"gentle": 0.27, "on": None, "eager": None}
"""Of serving's floating-point operations. What is promised is 0.3 at `gentle`: scores and the step under way come on top."""
AWAY_SECONDS = 3.0
_READ_SECONDS = 1.0


class Allowance:
    def __init__(self, state: Path, level: str, now: Callable[[], float] = time.monotonic) -> None:
        """Serving's operations are those in its status row, which it writes every few seconds; where nobody writes one
        (vLLM serves) there is no limit."""
        self._state, self._share, self._now = state, SHARES[level], now
        self._opened_at: tuple[float, float] | None = None  # training's and serving's operations
        self._serve_flops: float | None = None
        self._read_at = float("-inf")

    def is_spent(self, train_flops: float, seconds_since_busy: float) -> bool:
        """`train_flops`: of everybody who trains, so far. `seconds_since_busy`: since requests were last seen running."""
        if self._share is None or seconds_since_busy > AWAY_SECONDS:
            self._opened_at = None
            return False
        serve_flops = self._latest_serve_flops()
        if serve_flops is None:
            return False
        if self._opened_at is None or serve_flops < self._opened_at[1]:  # less: another serving process counts anew
            self._opened_at = train_flops, serve_flops
        train_before, serve_before = self._opened_at
        return train_flops - train_before >= self._share * (serve_flops - serve_before)

    def _latest_serve_flops(self) -> float | None:
        if self._now() - self._read_at >= _READ_SECONDS:
            self._read_at = self._now()
            self._serve_flops = read_status(self._state, "serving").get("serve_flops")
        return self._serve_flops
