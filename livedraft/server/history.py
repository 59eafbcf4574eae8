"""What the dashboard's curves are drawn from: a bounded record of the past, exact in its sums, coarser the older it is.

Points are sums over a stretch of time, so neighbours can become one without changing any rate. When there are too many, those
two are joined whose joint length is the least for their age: the last minutes stay fine, last week is a few hundred points,
and stretches without requests stay the gaps they were.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("livedraft")
FILE_NAME = "dashboard_history.json"
MAX_POINTS = 600
MAX_CURVES = 16
"""Routes and other sources of proposals with a curve of their own; later ones are left out."""
_AGE_OFFSET_SECONDS = 30.0
"""Young points would never be joined otherwise."""


@dataclass(kw_only=True)
class Point:
    """What happened from `start` to `end` (seconds since 1970)."""

    start: float
    end: float
    busy_seconds: float = 0.0
    num_tokens: int = 0
    estimated_seconds: float = 0.0
    estimated_plain_seconds: float = 0.0
    curves: dict[str, list[int]] = field(default_factory=dict)
    """By route, or by what else proposes: [rounds with k >= 1, drafted, accepted]."""
    alpha: float | None = None
    """At the end, over the last hundred scored requests."""
    loss: float | None = None
    """At the end."""

    def joined(self, later: Point) -> Point:
        curves = {name: list(counts) for name, counts in self.curves.items()}
        for name, counts in later.curves.items():
            curves[name] = [a + b for a, b in zip(curves.get(name, [0, 0, 0]), counts, strict=True)]
        return Point(
            start=self.start,
            end=later.end,
            busy_seconds=self.busy_seconds + later.busy_seconds,
            num_tokens=self.num_tokens + later.num_tokens,
            estimated_seconds=self.estimated_seconds + later.estimated_seconds,
            estimated_plain_seconds=self.estimated_plain_seconds + later.estimated_plain_seconds,
            curves=curves,
            alpha=self.alpha if later.alpha is None else later.alpha,
            loss=self.loss if later.loss is None else later.loss,
        )

    def as_json(self) -> dict[str, Any]:
        """Without what is empty, and no more digits than a picture needs."""
        return {
            name: round(value, 3 if name in ("start", "end") else 6) if isinstance(value, float) else value
            for name, value in asdict(self).items()
            if value not in (None, {}, 0)
        }


class History:
    """Points, oldest first, at most `max_points`."""

    def __init__(self, points: Iterable[Point] = (), *, max_points: int = MAX_POINTS) -> None:
        self.points = list(points)
        self._max_points = max_points
        self._shrink()

    def add(self, point: Point) -> None:
        self.points.append(point)
        self._shrink()

    def _shrink(self) -> None:
        while len(self.points) > self._max_points:
            now = self.points[-1].end
            pairs = zip(self.points, self.points[1:], strict=False)
            costs = [(b.end - a.start) / (max(0.0, now - b.end) + _AGE_OFFSET_SECONDS) for a, b in pairs]
            first = costs.index(min(costs))
            self.points[first : first + 2] = [self.points[first].joined(self.points[first + 1])]

    def recent(self, num_drafted: int, seconds: float) -> Point | None:
        """The newest points as one: back until so many tokens were drafted in it, or so many seconds were busy."""
        total: Point | None = None
        for point in reversed(self.points):
            if not point.num_tokens:
                continue
            total = point if total is None else point.joined(total)
            drafted = sum(counts[1] for counts in total.curves.values())
            if drafted >= num_drafted or total.busy_seconds >= seconds:
                break
        return total

    # --- on disk ----------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, state: Path) -> History:
        """As an earlier process left it; empty when there is none, or none that can be read: it is only a picture."""
        try:
            rows = json.loads((state / FILE_NAME).read_text(encoding="utf-8"))
            points = [Point(**row) for row in rows]
            for point in points:  # what a wrong hand has written must fail here, not in a thread later
                Point(start=point.start, end=point.end).joined(point)
                assert point.end >= point.start
            return cls(points)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, AttributeError, AssertionError) as error:
            logger.warning("The dashboard's history in %s cannot be read (%s); it starts afresh.", state, error)
            return cls()

    @staticmethod
    def save(state: Path, rows: list[dict[str, Any]]) -> None:
        """Whole or not at all. A full disk costs the picture, nothing else."""
        path = state / FILE_NAME
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(rows, separators=(",", ":")), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("The dashboard's history could not be written: %s", error)
