"""Is a new version as good live as the gate said? From counters of the serving process alone, so it works with the trainer
dead.

Two versions serve side by side, the requests shared out by hash. What is compared is the acceptance of the first drafted
token of a round: every round that drafts has one, whatever length was chosen. Requests differ more than rounds do, so the
spread between requests is part of the standard error, and a version is called worse only when it is so by more than MARGIN
beyond it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from livedraft.speculation.stats import SpeculationStats

CANARY_ROUNDS = 32
"""Request rounds of the new version before it may take all requests; also the least either side needs to be compared."""
WATCHED_REQUESTS = 64
"""Requests of the new version after which the comparison ends in its favour."""
MARGIN = 0.02
_SPREAD = 0.12
"""Standard deviation of the acceptance between requests: 0.08 on GSM8K alone (docs/experiments.md), and more where the
traffic is mixed; too large a value only makes the watch slower to call a version worse."""
_NUM_ERRORS = {"canary": 2.0, "watched": 3.0}
"""Standard errors a version has to lie below: one look for the canary, many for the watched one."""

Stage = Literal["canary", "watched"]
Finding = Literal["undecided", "worse", "fine"]


@dataclass(frozen=True, kw_only=True)
class LiveCounts:
    num_requests: int
    num_rounds: int
    num_accepted: int
    num_drafted_tokens: int

    @classmethod
    def of(cls, stats: SpeculationStats | None) -> LiveCounts:
        """Of another thread's counters: each figure is whole, two may be a round apart."""
        if stats is None:
            return cls(num_requests=0, num_rounds=0, num_accepted=0, num_drafted_tokens=0)
        return cls(
            num_requests=stats.num_requests,
            num_rounds=stats.num_drafts,
            num_accepted=stats.num_first_accepted,
            num_drafted_tokens=stats.num_draft_tokens,
        )

    def since(self, start: LiveCounts) -> LiveCounts:
        return LiveCounts(**{name: value - getattr(start, name) for name, value in asdict(self).items()})

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def variance(self) -> float:
        """Of `rate`, for a comparison: rounds within requests, and between requests. One count is added to each side, or a
        version that never had a token accepted would be certain of itself."""
        rate = (self.num_accepted + 1) / (self.num_rounds + 2)
        return rate * (1 - rate) / max(1, self.num_rounds) + _SPREAD**2 / max(1, self.num_requests)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    finding: Finding
    reason: str
    numbers: dict[str, Any]


def judge(stage: Stage, new: LiveCounts, old: LiveCounts, *, expected: float | None) -> Judgement:
    """Compare the version on trial with the one it is to replace, or has just replaced.

    `expected` is the old one's acceptance as the gate measured it; it stands in while the old one has not drafted enough.
    """
    if new.num_rounds < CANARY_ROUNDS:
        return _judgement("undecided", f"{new.num_rounds} of {CANARY_ROUNDS} rounds", new, old)
    if old.num_rounds >= CANARY_ROUNDS:
        reference, variance = old.rate, old.variance
    elif expected is not None:
        reference, variance = expected, _SPREAD**2 / 8
    else:
        return _judgement("undecided", f"{old.num_rounds} of {CANARY_ROUNDS} rounds of the version before", new, old)
    least = reference - MARGIN - _NUM_ERRORS[stage] * math.sqrt(new.variance + variance)
    sentence = f"first drafted tokens accepted live: {new.rate:.2f} against {reference:.2f}"
    if new.rate < least:
        return _judgement("worse", f"{sentence}, less than chance explains ({least:.2f})", new, old)
    if new.rate < reference:
        sentence += f" (by chance alone down to {max(0.0, least):.2f}; requests so far: {new.num_requests})"
    if stage == "canary" or new.num_requests >= WATCHED_REQUESTS:
        return _judgement("fine", sentence, new, old)
    return _judgement("undecided", sentence, new, old)


def _judgement(finding: Finding, reason: str, new: LiveCounts, old: LiveCounts) -> Judgement:
    numbers = {
        "live_rate": round(new.rate, 4),
        "live_rounds": new.num_rounds,
        "live_requests": new.num_requests,
        "live_drafted_tokens": new.num_drafted_tokens,
        "parent_live_rate": round(old.rate, 4),
        "parent_live_rounds": old.num_rounds,
    }
    return Judgement(finding=finding, reason=reason, numbers=numbers)
