"""Several drafts: which streams of traffic get one of their own, and whose draft serves which stream.

The target's verdicts on a text score every draft, not only the one that drafted for it (full information): of new requests a
sample is scored under all of them before anything is trained on it. No pass of the target, and the router's classes are only
where it starts.
  1. A stream that has brought enough requests, beside others, gets a draft of its own: a copy of the one that does best on it.
  2. A stream is given to another route's draft when that is better on its requests beyond chance, its own draft included. No
     verdict is passed on a draft that has just been copied: it needs requests of its own to become another.
  3. What a stream brings trains the draft that serves it, so streams that suit one draft become one.
  4. A route whose own stream is better served elsewhere, or brings nothing any more, is closed, and tried again only after
     twice as many requests.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from livedraft.config import RoutingConfig
from livedraft.learning.store import Streams
from livedraft.records import DEFAULT_ROUTE

SAMPLE = 2
"""One new request in so many is scored under every draft."""
WINDOW = 48
"""Scored requests of a stream that are remembered."""
LEAST_SCORED = 12
"""Before a stream is given to another draft."""
WRONG_MOVES = 0.05
"""Chance that a look at a stream finds another draft better that is no better, over all drafts that compete."""
LEAST_LEAD = 0.01
"""Of alpha: copies of one draft differ by little and nearly alike on every request, so tiny differences look certain."""
YOUNG_REQUESTS = 48
"""Of its own streams, until a new draft is judged, and may be given other streams."""
LEAST_SHARE_OF_OTHERS = 0.2
"""Of a draft's recent requests from other streams; a stream that has its draft to itself needs no copy."""
_NUM_RECENT = 64


@dataclass(frozen=True, kw_only=True)
class Change:
    kind: Literal["open", "assign", "close"]
    stream: str
    route: str
    """open: whose draft is copied; assign: whose draft serves the stream from now on; close: the route itself."""
    reason: str


class Routing:
    """What is known of every stream. Told every new request once, by the training process."""

    def __init__(self, config: RoutingConfig) -> None:
        self.config = config
        self.assignments: dict[str, str] = {}
        """Streams served by another draft than the default one."""
        self.open: list[str] = []
        """Routes with a draft of their own beside the default one."""
        self._scored: dict[str, deque[dict[str, float]]] = {}
        self._num_requests: Counter[str] = Counter()
        """By stream, since it last lost its draft."""
        self._num_closed: Counter[str] = Counter()
        self._num_served: Counter[str] = Counter()
        """By route, the requests of its streams since it opened."""
        self._num_scored: Counter[str] = Counter()
        """By stream, ever."""
        self._doubted_at: dict[str, int] = {}
        """Routes whose own stream would be better served elsewhere: scored requests when that was first seen."""
        self._seen_at: dict[str, float] = {}
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)

    def route_of(self, stream: str) -> str:
        return self.assignments.get(stream, DEFAULT_ROUTE)

    def streams_of(self, route: str) -> Streams:
        """Whose traces this route's draft learns from."""
        if route == DEFAULT_ROUTE:
            return Streams(names=tuple(sorted(self.assignments)))
        names = tuple(sorted(stream for stream, given in self.assignments.items() if given == route))
        return Streams(names=names, are_left_out=False)

    def see(self, stream: str, alphas: Mapping[str, float] | None = None) -> None:
        """A new request; with its acceptance under each route's draft, where it was scored."""
        self._num_requests[stream] += 1
        self._seen_at[stream] = time.time()
        self._recent.append(stream)
        self._num_served[self.route_of(stream)] += 1
        if alphas:
            self._num_scored[stream] += 1
            self._scored.setdefault(stream, deque(maxlen=WINDOW)).append(dict(alphas))

    def alpha(self, stream: str, route: str) -> float | None:
        """Of that route's draft on the stream's last scored requests; None when none was scored."""
        values = [one[route] for one in self._scored.get(stream, ()) if route in one]
        return sum(values) / len(values) if values else None

    def is_sampled(self, number: int, every: int = SAMPLE) -> bool:
        return bool(self.open) and number % every == 0

    # --- deciding ---------------------------------------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """What should be otherwise now; nothing is changed here but by `apply`."""
        return [*self._better_served(), *self._useless(), *self._worth_opening()]

    def apply(self, change: Change) -> None:
        if change.kind == "open":
            self.open.append(change.stream)
            self.assignments[change.stream] = change.stream
            self._num_served[change.stream] = 0
            self._forget_scores({change.stream})
        elif change.kind == "assign":
            self.assignments[change.stream] = change.route
            if change.route == DEFAULT_ROUTE:
                del self.assignments[change.stream]
        else:
            self.open.remove(change.route)
            self._doubted_at.pop(change.route, None)
            self._num_closed[change.route] += 1
            self._num_requests[change.route] = 0
            for stream in [stream for stream, route in self.assignments.items() if route == change.route]:
                del self.assignments[stream]

    def _better_served(self) -> list[Change]:
        found = []
        for stream, scored in self._scored.items():
            current = self.route_of(stream)
            if self._is_young(current):
                continue
            rivals = [route for route in (DEFAULT_ROUTE, *self.open) if route != current and not self._is_young(route)]
            best, lead = current, 0.0
            for route in rivals:
                mean, error = self._lead(stream, route, current) or (0.0, math.inf)
                if mean > max(_num_errors(len(rivals)) * error, LEAST_LEAD, lead):
                    best, lead = route, mean
            if best == current:
                self._doubted_at.pop(stream, None)
            elif current != stream or self._is_doubted_again(stream):
                reason = f"alpha is {lead:.3f} higher there on {len(scored)} requests"
                found.append(Change(kind="assign", stream=stream, route=best, reason=reason))
        return found

    def _is_young(self, route: str) -> bool:
        return route != DEFAULT_ROUTE and self._num_served[route] < YOUNG_REQUESTS

    def _is_doubted_again(self, route: str) -> bool:
        """A route without its own stream is closed: that takes a second look, on as many requests more as the first needed."""
        first = self._doubted_at.setdefault(route, self._num_scored[route])
        return self._num_scored[route] - first >= LEAST_SCORED

    def _lead(self, stream: str, route: str, current: str) -> tuple[float, float] | None:
        """By how much alpha is higher there on the stream's requests, paired, and the standard error of that; None when too few
        were scored."""
        scored = self._scored.get(stream, ())
        differences = [one[route] - one[current] for one in scored if route in one and current in one]
        return _mean_and_error(differences) if len(differences) >= LEAST_SCORED else None

    def _best_on(self, stream: str) -> str:
        """Whose draft did best on it so far: nothing is lost by a copy of one that is only probably better."""
        current = self.route_of(stream)
        leads = {route: self._lead(stream, route, current) for route in (DEFAULT_ROUTE, *self.open) if route != current}
        means = {route: lead[0] for route, lead in leads.items() if lead is not None and lead[0] > LEAST_LEAD}
        return max(means, key=means.__getitem__, default=current)

    def _useless(self) -> list[Change]:
        found = []
        for route in self.open:
            is_idle = time.time() - self._seen_at.get(route, time.time()) > self.config.idle_days * 86400
            serves = [stream for stream, given in self.assignments.items() if given == route]
            if not serves:
                found.append(Change(kind="close", stream=route, route=route, reason="no stream is served better by it"))
            elif is_idle and serves == [route]:
                reason = f"no request for {self.config.idle_days:g} days"
                found.append(Change(kind="close", stream=route, route=route, reason=reason))
        return found

    def _worth_opening(self) -> list[Change]:
        """The largest stream that shares its draft with others."""
        if len(self.open) >= self.config.max_drafts:
            return []
        recent = Counter(self._recent)
        by_route: Counter[str] = Counter()
        for stream, count in recent.items():
            by_route[self.route_of(stream)] += count
        for stream, count in recent.most_common():
            least = self.config.min_requests * 2 ** min(self._num_closed[stream], 5)
            route = self.route_of(stream)
            shares = by_route[route] - count >= LEAST_SHARE_OF_OTHERS * by_route[route]
            if stream not in (DEFAULT_ROUTE, *self.open) and self._num_requests[stream] >= least and shares:
                reason = f"{self._num_requests[stream]} requests"
                return [Change(kind="open", stream=stream, route=self._best_on(stream), reason=reason)]
        return []

    def _forget_scores(self, streams: set[str]) -> None:
        for stream in streams:
            self._scored.pop(stream, None)

    # --- surviving a restart ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """As JSON; the scores of the last requests are gathered anew."""
        return {
            "assignments": self.assignments,
            "open": self.open,
            "num_requests": dict(self._num_requests),
            "num_closed": dict(self._num_closed),
            "num_served": dict(self._num_served),
            "seen_at": self._seen_at,
        }

    def restore(self, state: Mapping[str, Any], routes: list[str]) -> None:
        """`routes` are those that the registry has; what was given to others is the default one's."""
        self.open = [route for route in routes if route != DEFAULT_ROUTE]
        given = dict(state.get("assignments", {}))
        self.assignments = {stream: route for stream, route in given.items() if route in self.open}
        for route in self.open:  # opened just before the process ended
            self.assignments.setdefault(route, route)
        self._num_requests = Counter(state.get("num_requests", {}))
        self._num_closed = Counter(state.get("num_closed", {}))
        self._num_served = Counter(state.get("num_served", {}))
        self._seen_at = dict(state.get("seen_at", {}))


def _num_errors(num_rivals: int) -> float:
    """Standard errors that the best of so many has to be ahead by: 1.64 of one, 2.5 of eight."""
    return NormalDist().inv_cdf(1.0 - WRONG_MOVES / max(1, num_rivals))


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
