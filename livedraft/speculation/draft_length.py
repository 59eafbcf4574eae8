"""How many tokens to draft: what gives the most expected tokens a second, 0 included, from measured costs.

Before a round: is any k worth its cost, by the acceptance seen so far at each position? If so, drafting goes on token by
token while one more is worth its cost: the chance that all drafted so far are accepted, from the draft's own probabilities
calibrated by past verdicts, times the next position's acceptance, against the cost of one more draft step and target row.
A drawn token is always kept; only whether to draw another is decided (lossless rule 3).

k = 0 is not the end: one round in PROBE_INTERVAL drafts anyway, and a new version brings a new prior.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_INTERVAL = 64
NUM_PROBE_TOKENS = 2
PRIOR_WEIGHT = 8.0
"""How many observations the prior acceptance counts for."""
NUM_CONFIDENCE_BINS = 10
MEMORY = 400.0
"""Observations after which old ones have faded: traffic and versions change."""


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """The decision for one round: at most `k` tokens, and below which chance of being accepted whole to stop."""

    k: int
    stop_below: float = 0.0
    is_probe: bool = False
    """Only to see whether drafting pays again: one request of the round is enough."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one target pass by number of rows, and of one draft step by number of requests. Measured at start on this
    machine."""

    target_seconds_by_rows: dict[int, float]
    draft_seconds_by_requests: dict[int, float]
    draft_write_seconds: float = 0.0
    """A token that the draft's cache lacks and has to be written."""
    _target: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _draft: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was asked before: a round asks for the same few counts dozens of times."""

    def target_seconds(self, num_rows: int) -> float:
        if num_rows not in self._target:
            self._target[num_rows] = _interpolated(self.target_seconds_by_rows, num_rows)
        return self._target[num_rows]

    def draft_step_seconds(self, num_requests: int) -> float:
        if num_requests not in self._draft:
            self._draft[num_requests] = _interpolated(self.draft_seconds_by_requests, num_requests)
        return self._draft[num_requests]

    @property
    def draft_cost(self) -> float:
        """c: one draft step in target steps, at batch 1."""
        return self.draft_step_seconds(1) / self.target_seconds(1)

    def verify_cost(self, num_tokens: int) -> float:
        """V(n): a pass over n tokens in target steps."""
        return self.target_seconds(num_tokens) / self.target_seconds(1)


def _interpolated(measured: dict[int, float], count: int) -> float:
    """Between measured counts along a line, past the last along the last stretch, never below the first."""
    counts = sorted(measured)
    costs = [measured[one] for one in counts]
    if len(counts) == 1:
        return costs[0]
    right = min(max(1, bisect_left(counts, count)), len(counts) - 1)
    share = (count - counts[right - 1]) / (counts[right] - counts[right - 1])
    return max(costs[0], costs[right - 1] + share * (costs[right] - costs[right - 1]))


def expected_tokens(acceptance_by_position: list[float], k: int) -> float:
    """Tokens one round emits: 1 + sum over i <= k of the product of the first i acceptances."""
    total, reached = 1.0, 1.0
    for acceptance in acceptance_by_position[:k]:
        reached *= acceptance
        total += reached
    return total


class DraftLengthPolicy:
    """One route's running estimate of acceptance by position, and the k that follows from it."""

    def __init__(
        self,
        costs: CostModel,
        *,
        max_tokens: int,
        fixed: int | None = None,
        prior: float = 0.3,
        is_stepwise: bool = True,
    ) -> None:
        """`is_stepwise`: drafting can stop after any token; else the whole loop has the length chosen before."""
        self.costs = costs
        self.max_tokens = max_tokens if fixed is None else fixed
        self.fixed = fixed
        self.is_stepwise = is_stepwise
        self.num_rounds = 0
        self.set_prior(prior)

    def set_prior(self, acceptance: float) -> None:
        """Start anew from an outside estimate (the trainer's alpha of the version now in service)."""
        self.prior = min(max(acceptance, 0.0), 1.0)
        self._reached = [0.0] * self.max_tokens
        self._accepted = [0.0] * self.max_tokens
        # Until verdicts say otherwise a draft is taken at its word: the middle of each bin.
        self._bin_reached = [PRIOR_WEIGHT] * NUM_CONFIDENCE_BINS
        self._bin_accepted = [PRIOR_WEIGHT * (b + 0.5) / NUM_CONFIDENCE_BINS for b in range(NUM_CONFIDENCE_BINS)]

    def record(self, num_drafted: int, num_accepted: int, confidences: Sequence[float] = ()) -> None:
        """Learn from one request's verdict: positions after the first rejection say nothing."""
        decay = 1.0 - 1.0 / MEMORY
        for position in range(min(num_drafted, num_accepted + 1)):
            is_accepted = position < num_accepted
            self._reached[position] = self._reached[position] * decay + 1.0
            self._accepted[position] = self._accepted[position] * decay + is_accepted
            if confidences:
                index = _bin(confidences[position])
                self._bin_reached[index] = self._bin_reached[index] * decay + 1.0
                self._bin_accepted[index] = self._bin_accepted[index] * decay + is_accepted

    def acceptance_of(self, confidence: float) -> float:
        """Chance that a token is accepted, from the draft's own probability of it, as past verdicts have it."""
        index = _bin(confidence)
        return self._bin_accepted[index] / self._bin_reached[index]

    @property
    def acceptance_by_position(self) -> list[float]:
        """Probability that position i is accepted once reached; rarely reached ones lean on the one before."""
        estimates, lean = [], self.prior
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            lean = (accepted + PRIOR_WEIGHT * lean) / (reached + PRIOR_WEIGHT)
            estimates.append(lean)
        return estimates

    def choose(self, num_requests: int, num_other_rows: int = 0) -> DraftLength:
        """For the coming round of `num_requests` decoding requests beside `num_other_rows` prefill rows."""
        self.num_rounds += 1
        if self.fixed is not None:
            return DraftLength(k=self.fixed)
        acceptance = self.acceptance_by_position
        best = self.best(num_requests, num_other_rows, acceptance)
        if best == 0:
            is_probe = self.num_rounds % PROBE_INTERVAL == 0
            return DraftLength(k=min(NUM_PROBE_TOKENS, self.max_tokens) if is_probe else 0, is_probe=is_probe)
        if not self.is_stepwise:
            return DraftLength(k=best)
        rows = num_requests * (best + 1) + num_other_rows
        one_more = self.costs.draft_step_seconds(num_requests) + self.costs.target_seconds(rows + num_requests)
        extra_seconds = one_more - self.costs.target_seconds(rows)
        next_acceptance = max(acceptance[best - 1], 1e-3)
        # Worth it while reach * next_acceptance / extra_seconds exceeds the round's own tokens a second.
        stop_below = (
            extra_seconds * self._tokens_per_second(best, num_requests, num_other_rows, acceptance) / next_acceptance
        )
        return DraftLength(k=self.max_tokens, stop_below=min(stop_below, 1.0))

    def best(self, num_requests: int, num_other_rows: int = 0, acceptance: list[float] | None = None) -> int:
        """The fixed k with the most expected tokens a second."""
        acceptance = acceptance or self.acceptance_by_position
        lengths = range(self.max_tokens + 1)
        speeds = [self._tokens_per_second(k, num_requests, num_other_rows, acceptance) for k in lengths]
        return speeds.index(max(speeds))

    def explained(self, num_requests: int) -> tuple[int, str]:
        """(the draft length for so many decoding requests, why), for people."""
        if self.fixed is not None:
            return self.fixed, "fixed by num_speculative_tokens"
        acceptance = self.acceptance_by_position
        best = self.best(num_requests, 0, acceptance)
        plain, *others = (self._tokens_per_second(k, num_requests, 0, acceptance) for k in range(self.max_tokens + 1))
        gain = max(others, default=0.0) / plain
        if best == 0:
            again = f"one round in {PROBE_INTERVAL} looks again"
            return 0, f"no length pays: the best would give {gain:.2f} × plain decoding; {again}"
        return best, f"promises the most, {gain:.2f} × plain decoding; an unsure draft stops earlier"

    def value(self, num_requests: int, num_rows: int) -> float:
        """Of drafting in the coming round, for each of `num_requests` requests: the tokens it is expected to add, less those
        that plain decoding of `num_rows` rows would give in the time it takes."""
        target, rate = self.costs.target_seconds, num_requests / self.costs.target_seconds(num_rows)
        acceptance = self.acceptance_by_position
        best = 0.0 if self.fixed is None else float("-inf")
        for k in range(1, self.max_tokens + 1) if self.fixed is None else [self.fixed]:
            added = target(num_rows + num_requests * k) - target(num_rows)
            seconds = k * self.costs.draft_step_seconds(num_requests) + added
            best = max(best, expected_tokens(acceptance, k) - 1.0 - rate * seconds / num_requests)
        return best

    def _tokens_per_second(self, k: int, num_requests: int, num_other_rows: int, acceptance: list[float]) -> float:
        """Of one request, when all draft k tokens."""
        rows = num_requests * (k + 1) + num_other_rows
        seconds = k * self.costs.draft_step_seconds(num_requests) + self.costs.target_seconds(rows)
        return expected_tokens(acceptance, k) / seconds


def _bin(confidence: float) -> int:
    return min(int(confidence * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
