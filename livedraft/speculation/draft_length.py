"""How many tokens to draft: the k with the most expected tokens a second, 0 included, from measured costs.

Decided before anything is drawn (lossless rule 3). k = 0 is not the end: one round in PROBE_INTERVAL drafts anyway, and
a new version brings a new prior.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

PROBE_INTERVAL = 64
NUM_PROBE_TOKENS = 2
PRIOR_WEIGHT = 8.0
"""How many observations the prior acceptance counts for."""
MEMORY = 400.0
"""Observations after which old ones have faded: traffic and versions change."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one target pass by number of rows, and of one draft step. Measured at start on this machine."""

    target_seconds_by_rows: dict[int, float]
    draft_step_seconds: float

    def target_seconds(self, num_rows: int) -> float:
        """Interpolated between measured row counts, extrapolated along the last stretch."""
        rows = sorted(self.target_seconds_by_rows)
        costs = [self.target_seconds_by_rows[row] for row in rows]
        if len(rows) == 1:
            return costs[0]
        right = min(max(1, bisect_left(rows, num_rows)), len(rows) - 1)
        share = (num_rows - rows[right - 1]) / (rows[right] - rows[right - 1])
        return max(costs[0], costs[right - 1] + share * (costs[right] - costs[right - 1]))

    @property
    def draft_cost(self) -> float:
        """c: one draft step in target steps."""
        return self.draft_step_seconds / self.target_seconds(1)

    def verify_cost(self, num_tokens: int) -> float:
        """V(n): a pass over n tokens in target steps."""
        return self.target_seconds(num_tokens) / self.target_seconds(1)


def expected_tokens(acceptance_by_position: list[float], k: int) -> float:
    """Tokens one round emits: 1 + sum over i <= k of the product of the first i acceptances (papers D3)."""
    total, reached = 1.0, 1.0
    for acceptance in acceptance_by_position[:k]:
        reached *= acceptance
        total += reached
    return total


class DraftLengthPolicy:
    """One route's running estimate of acceptance by position, and the k that follows from it."""

    def __init__(self, costs: CostModel, *, max_tokens: int, fixed: int | None = None, prior: float = 0.3) -> None:
        self.costs = costs
        self.max_tokens = max_tokens if fixed is None else fixed
        self.fixed = fixed
        self.num_rounds = 0
        self.set_prior(prior)

    def set_prior(self, acceptance: float) -> None:
        """Start anew from an outside estimate (the trainer's alpha of the version now in service)."""
        self.prior = min(max(acceptance, 0.0), 1.0)
        self._reached = [0.0] * self.max_tokens
        self._accepted = [0.0] * self.max_tokens

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from one request's verdict: positions after the first rejection say nothing."""
        for position in range(min(num_drafted, num_accepted + 1)):
            decay = 1.0 - 1.0 / MEMORY
            self._reached[position] = self._reached[position] * decay + 1.0
            self._accepted[position] = self._accepted[position] * decay + (position < num_accepted)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Probability that position i is accepted once reached; rarely reached ones lean on the one before."""
        estimates, lean = [], self.prior
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            lean = (accepted + PRIOR_WEIGHT * lean) / (reached + PRIOR_WEIGHT)
            estimates.append(lean)
        return estimates

    def choose(self, num_requests: int, num_other_rows: int = 0) -> int:
        """k for the coming round of `num_requests` decoding requests beside `num_other_rows` prefill rows."""
        self.num_rounds += 1
        if self.fixed is not None:
            return self.fixed
        best = self.best(num_requests, num_other_rows)
        if best == 0 and self.num_rounds % PROBE_INTERVAL == 0:
            return min(NUM_PROBE_TOKENS, self.max_tokens)
        return best

    def best(self, num_requests: int, num_other_rows: int = 0) -> int:
        acceptance = self.acceptance_by_position

        def tokens_per_second(k: int) -> float:
            rows = num_requests * (k + 1) + num_other_rows
            seconds = k * self.costs.draft_step_seconds + self.costs.target_seconds(rows)
            return expected_tokens(acceptance, k) / seconds

        return max(range(self.max_tokens + 1), key=tokens_per_second)
