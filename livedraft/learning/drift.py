"""Has the traffic changed? Acceptance of the served draft says so: it falls when users ask about other things.

A short average against a long one before it. What has come since is told from where the short average's own numbers change, so
that the first requests of the new traffic are not judged together with the last ones of the old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHORT, LONG, RATIO = 16, 96, 0.75
"""Drift: alpha of the last SHORT requests under RATIO of the LONG before them."""
SUSPICIOUS = 4
"""So many requests under RATIO are no proof, but a reason to look at every one that comes."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    alpha: float
    before: float
    since_id: int
    """The first trace of the new traffic."""


class DriftWatch:
    """Told every request's alpha, in the order of arrival."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=SHORT + LONG)

    @property
    def recent(self) -> list[float]:
        """Alphas of the last SHORT requests since the last change."""
        return [alpha for _, alpha in self._seen][-SHORT:]

    @property
    def is_suspicious(self) -> bool:
        alphas = [alpha for _, alpha in self._seen]
        is_known = len(alphas) >= SUSPICIOUS + LONG // 2
        return is_known and _mean(alphas[-SUSPICIOUS:]) < RATIO * _mean(alphas[:-SUSPICIOUS])

    def clear(self) -> None:
        self._seen.clear()

    def restore(self, alpha_by_trace: Mapping[int, float]) -> None:
        """After a restart: what the version in service had come to since the last change. Decides nothing."""
        self._seen.extend(alpha_by_trace.items())

    def see(self, alpha_by_trace: Mapping[int, float]) -> Drift | None:
        """More requests; a Drift when they show that the traffic has changed. Then nothing is remembered of the old."""
        self._seen.extend(alpha_by_trace.items())
        if len(self._seen) < SHORT + LONG // 2:
            return None
        alphas = [alpha for _, alpha in self._seen]
        before, now = _mean(alphas[:-SHORT]), _mean(alphas[-SHORT:])
        if now >= RATIO * before:
            return None
        since_id = list(self._seen)[-SHORT:][change_point(alphas[-SHORT:])][0]
        self.clear()
        return Drift(alpha=now, before=before, since_id=since_id)


def change_point(values: Sequence[float]) -> int:
    """Where a fall begins: the index that splits the values into two parts that are each as even as can be; 0 when the whole is
    as even."""

    def unevenness(part: Sequence[float]) -> float:
        return sum((value - _mean(part)) ** 2 for value in part)

    costs = [unevenness(values[:split]) + unevenness(values[split:]) for split in range(len(values))]
    best = min(range(len(costs)), key=costs.__getitem__)
    # A split that explains little is noise within one kind of traffic.
    return best if costs[best] < 0.5 * costs[0] - 1e-9 else 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
