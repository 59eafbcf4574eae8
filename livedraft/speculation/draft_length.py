"""How many tokens to draft: what gives the most expected tokens a second, 0 included, from measured costs.

Before a round: is any length worth its cost, by the acceptance seen so far at each position? If so, drafting goes on token by
token while more is worth its cost: the chance that all drafted so far are accepted and the next one too, from the draft's own
probabilities calibrated by past verdicts, against the cost of what is still to come, at each position its own. A drawn token
is always kept; only whether to draw another is decided (lossless rule 3).

All this is one route's; a request that does better or worse than its route's is known by its own verdicts (`OwnAcceptance`).

k = 0 is not the end: one round in PROBE_INTERVAL drafts anyway, and a new version brings a new prior.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from livedraft.speculation.own_acceptance import OwnAcceptance

PROBE_INTERVAL = 64
NUM_PROBE_TOKENS = 2
PRIOR_WEIGHT = 8.0
"""How many observations the prior acceptance counts for."""
NUM_CONFIDENCE_BINS = 10
MEMORY = 400.0
"""Observations after which old ones have faded: traffic and versions change."""
_ALIKE = 0.1
"""A request whose acceptance is this near its route's has its route's length."""
_MOST_KEPT = 4096
"""Prices of rounds that are remembered."""


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """The decision for one round: at most `k` tokens, and after each of them below which chance that it and the next one are
    accepted, with all before, to stop. Empty: never."""

    k: int
    stop_below: tuple[float, ...] = ()
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
    _prices: dict[tuple[int, int, int], tuple[float, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What was asked before: a round asks for the same few counts dozens of times."""

    def target_seconds(self, num_rows: int) -> float:
        if num_rows not in self._target:
            self._target[num_rows] = _interpolated(self.target_seconds_by_rows, num_rows)
        return self._target[num_rows]

    def draft_step_seconds(self, num_requests: int) -> float:
        if num_requests not in self._draft:
            self._draft[num_requests] = _interpolated(self.draft_seconds_by_requests, num_requests)
        return self._draft[num_requests]

    def prices(self, num_requests: int, num_rows: int, most: int) -> tuple[float, ...]:
        """Seconds that drafting 0, 1, ... `most` tokens for each of `num_requests` adds to a round of `num_rows` rows."""
        key = num_requests, num_rows, most
        found = self._prices.get(key)
        if found is None:
            if len(self._prices) == _MOST_KEPT:
                self._prices.clear()
            plain, step = self.target_seconds(num_rows), self.draft_step_seconds(num_requests)
            found = self._prices[key] = tuple(
                k * step + self.target_seconds(num_rows + k * num_requests) - plain for k in range(most + 1)
            )
        return found

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
        self._bin_went_on = [PRIOR_WEIGHT] * NUM_CONFIDENCE_BINS
        self._bin_next_accepted = [PRIOR_WEIGHT * self.prior] * NUM_CONFIDENCE_BINS
        self._rounds = self._round_drafted = self._round_accepted = 0.0
        self._acceptance: list[float] = []
        """`acceptance_by_position` until the next verdict: a round asks for it many times a request. Empty: to be computed."""

    def refresh_prior(self, acceptance: float) -> None:
        """A newer outside estimate of the same draft. What was learnt since counts for half: where nothing is drafted it is
        old, and where something is, a few requests bring it back."""
        self.prior = min(max(acceptance, 0.0), 1.0)
        self._acceptance = []
        for counts in (self._reached, self._accepted):
            counts[:] = [count / 2 for count in counts]
        self._rounds, self._round_drafted, self._round_accepted = (
            count / 2 for count in (self._rounds, self._round_drafted, self._round_accepted)
        )

    def record(
        self,
        num_drafted: int,
        num_accepted: int,
        confidences: Sequence[float] = (),
        own: OwnAcceptance | None = None,
    ) -> None:
        """Learn from one request's verdict: positions after the first rejection say nothing. `own` learns beside."""
        decay = 1.0 - 1.0 / MEMORY
        if own is not None:
            own.record(num_accepted, sum(self.acceptance_by_position[: min(num_drafted, num_accepted + 1)]))
        self._acceptance = []
        self._rounds = self._rounds * decay + 1.0
        self._round_drafted = self._round_drafted * decay + num_drafted
        self._round_accepted = self._round_accepted * decay + num_accepted
        before = -1
        for position in range(min(num_drafted, num_accepted + 1)):
            is_accepted = position < num_accepted
            self._reached[position] = self._reached[position] * decay + 1.0
            self._accepted[position] = self._accepted[position] * decay + is_accepted
            if confidences:
                index = _bin(confidences[position])
                self._bin_reached[index] = self._bin_reached[index] * decay + 1.0
                self._bin_accepted[index] = self._bin_accepted[index] * decay + is_accepted
                if before >= 0:
                    self._bin_went_on[before] = self._bin_went_on[before] * decay + 1.0
                    self._bin_next_accepted[before] = self._bin_next_accepted[before] * decay + is_accepted
                before = index

    def chances_of(self, confidence: float) -> tuple[float, float]:
        """(chance that a token is accepted, from the draft's own probability of it, chance that then the next one is), as past
        verdicts have it."""
        index = _bin(confidence)
        return (
            self._bin_accepted[index] / self._bin_reached[index],
            self._bin_next_accepted[index] / self._bin_went_on[index],
        )

    @property
    def acceptance_by_position(self) -> list[float]:
        """Probability that position i is accepted once reached; rarely reached ones lean on the one before. Not to be written
        to."""
        estimates = self._acceptance
        if not estimates:
            estimates, lean = [], self.prior
            for reached, accepted in zip(self._reached, self._accepted, strict=True):
                lean = (accepted + PRIOR_WEIGHT * lean) / (reached + PRIOR_WEIGHT)
                estimates.append(lean)
            self._acceptance = estimates  # whole: whoever reports reads it from another thread
        return estimates

    def choose(self, num_requests: int, num_other_rows: int = 0) -> DraftLength:
        """For the coming round of `num_requests` decoding requests beside `num_other_rows` prefill rows."""
        self.num_rounds += 1
        if self.fixed is not None:
            return DraftLength(k=self.fixed)
        acceptance = self.acceptance_by_position
        best = self.best(num_requests, num_other_rows, acceptance)
        if best == 0 or self.value(num_requests, num_requests + num_other_rows) <= 0.0:
            is_probe = self.num_rounds % PROBE_INTERVAL == 0
            return DraftLength(k=min(NUM_PROBE_TOKENS, self.max_tokens) if is_probe else 0, is_probe=is_probe)
        if not self.is_stepwise:
            return DraftLength(k=best)
        return DraftLength(
            k=self.max_tokens, stop_below=self._thresholds(best, num_requests, num_other_rows, acceptance)
        )

    def _thresholds(
        self, best: int, num_requests: int, num_other_rows: int, acceptance: list[float]
    ) -> tuple[float, ...]:
        """After each drafted token: the least chance, of all so far with the next one, at which going on by some number of
        tokens still earns the tokens a second of the round's best length.

        Some number, not one: a pass may cost nothing more for a while and then jump, and a measured step up at one count of
        rows, noise mostly, must not end what the next ones earn back.
        """
        prices = self.costs.prices(num_requests, num_requests + num_other_rows, self.max_tokens)
        rate = self._tokens_per_second(best, num_requests, num_other_rows, acceptance)
        thresholds = []
        for drafted in range(1, self.max_tokens):
            least, reach, gain = 1.0, 1.0, 0.0
            for k in range(drafted + 1, self.max_tokens + 1):
                gain += reach
                least = min(least, rate * (prices[k] - prices[drafted]) / gain)
                reach *= acceptance[min(k, self.max_tokens - 1)]
            thresholds.append(max(least, 0.0))
        return tuple(thresholds)

    def adapted(self, length: DraftLength, own: OwnAcceptance, num_requests: int, num_rows: int) -> DraftLength:
        """The round's choice for one request by its own acceptance: none where it would earn nothing."""
        factor = own.factor
        if length.k == 0 or length.is_probe or self.fixed is not None or abs(factor - 1.0) < _ALIKE:
            return length
        if self.is_stepwise:
            if self.value(num_requests, num_rows, factor) <= 0.0:
                return DraftLength(k=0)
            return replace(length, stop_below=tuple([least / factor for least in length.stop_below]))
        return DraftLength(k=self._best_beside(length.k, num_requests, num_rows, factor))

    def _best_beside(self, rounds_best: int, num_requests: int, num_rows: int, factor: float) -> int:
        """The length that adds the most tokens, less what the time would give at the round's best length."""
        prices = self.costs.prices(num_requests, num_rows, self.max_tokens)
        acceptance = self.acceptance_by_position
        rate = self._tokens_per_second(rounds_best, num_requests, num_rows - num_requests, acceptance)
        best, most, reach, gain = 0, 0.0, 1.0, 0.0
        for k, chance in enumerate(acceptance, start=1):
            reach *= min(1.0, chance * factor)
            gain += reach
            if gain - rate * prices[k] > most:
                best, most = k, gain - rate * prices[k]
        return best

    def best(self, num_requests: int, num_other_rows: int = 0, acceptance: list[float] | None = None) -> int:
        """The fixed k with the most expected tokens a second."""
        acceptance = acceptance or self.acceptance_by_position
        lengths = range(self.max_tokens + 1)
        speeds = [self._tokens_per_second(k, num_requests, num_other_rows, acceptance) for k in lengths]
        return speeds.index(max(speeds))

    def prices_in_tokens(self, num_requests: int, num_rows: int) -> list[float]:
        """Of drafting 0, 1, ... tokens for each of `num_requests`, in tokens of plain decoding of a request."""
        rate = 1.0 / self.costs.target_seconds(num_rows)
        return [rate * price for price in self.costs.prices(num_requests, num_rows, self.max_tokens)]

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

    def value(self, num_requests: int, num_rows: int, factor: float = 1.0) -> float:
        """Of drafting in the coming round, for each of `num_requests` requests: the tokens it is expected to add, less those
        that plain decoding of `num_rows` rows would give in the time it takes. `factor`: as `OwnAcceptance.factor`."""
        prices = self.costs.prices(num_requests, num_rows, self.max_tokens)
        rate = 1.0 / self.costs.target_seconds(num_rows)
        best, reach, gain = float("-inf"), 1.0, 0.0
        for k, chance in enumerate(self.acceptance_by_position, start=1):
            reach *= min(1.0, chance * factor)
            gain += reach
            if self.fixed is None or k == self.fixed:
                best = max(best, gain - rate * prices[k])
        if self.fixed is not None or not self.is_stepwise:
            return best if self.max_tokens else 0.0
        return self._leaning_on_rounds(best, prices, rate, factor)

    def _leaning_on_rounds(self, expected: float, prices: Sequence[float], rate: float, factor: float) -> float:
        """Where drafting stops at unsure tokens, later positions are reached in sure contexts only and promise too much. So the
        more rounds there were, the more what they came to says."""
        if self._rounds < 1.0 or len(prices) < 2:
            return expected
        drafted, accepted = self._round_drafted / self._rounds, self._round_accepted / self._rounds
        low = min(int(drafted), len(prices) - 2)
        price = prices[low] + (drafted - low) * (prices[low + 1] - prices[low])
        found = accepted * factor - rate * price
        return (expected * PRIOR_WEIGHT + found * self._rounds) / (PRIOR_WEIGHT + self._rounds)

    def _tokens_per_second(self, k: int, num_requests: int, num_other_rows: int, acceptance: list[float]) -> float:
        """Of one request, when all draft k tokens."""
        rows = num_requests * (k + 1) + num_other_rows
        seconds = k * self.costs.draft_step_seconds(num_requests) + self.costs.target_seconds(rows)
        return expected_tokens(acceptance, k) / seconds


def _bin(confidence: float) -> int:
    return min(int(confidence * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
