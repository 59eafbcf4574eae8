"""How proposers do beside each other and beside what is known of a route.

A request that copies its prompt, or asks in a language the draft has not met, shows it within a few rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 6.0
"""Expected acceptances the route's word counts for: a request says something of itself after about as many."""
_KEPT = 1.0 - 1.0 / 64.0
"""Of what was seen, at each verdict: an answer's end may differ from its beginning."""
_KEPT_UNHEARD = 1.0 - 1.0 / 16.0
"""At each round without a verdict, or a request that began badly would not be tried again."""
_SHARE_KEPT, _SHARE_WEIGHT = 1.0 - 1.0 / 200.0, 8.0
"""Of what was seen, at each round; and tokens of worth all of which count as the draft's own, to begin with."""

_PROMISES_KEPT, _PROMISES_WEIGHT = 1.0 - 1.0 / 32.0, 8.0
"""Of what was promised before, at each request; and tokens of promises all of which count as kept, to begin with."""


@dataclass(slots=True)
class OwnAcceptance:
    """Accepted tokens over those the route's estimates led to expect, discounted and shrunk to 1."""

    accepted: float = 0.0
    expected: float = 0.0

    def record(self, accepted: float, expected: float) -> None:
        self.accepted = self.accepted * _KEPT + accepted
        self.expected = self.expected * _KEPT + expected

    def fade(self) -> None:
        """A round that said nothing."""
        self.accepted *= _KEPT_UNHEARD
        self.expected *= _KEPT_UNHEARD

    @property
    def factor(self) -> float:
        """What the route's acceptance is multiplied by for this request."""
        return (self.accepted + _WEIGHT) / (self.expected + _WEIGHT)


@dataclass(slots=True)
class SharedWorth:
    """What of a draft's worth is left beside suffixes: a round in which one goes first, or is nearly as good, needs none."""

    worth: float = 0.0
    left: float = 0.0

    def record(self, worth: float, suffix: float) -> None:
        """Of one round of one request."""
        self.worth = self.worth * _SHARE_KEPT + worth
        self.left = self.left * _SHARE_KEPT + max(0.0, worth - suffix)

    @property
    def share(self) -> float:
        return (self.left + _SHARE_WEIGHT) / (self.worth + _SHARE_WEIGHT)


@dataclass(slots=True)
class WrittenPrompt:
    """What a request lacked in its draft's cache was written for it. All in tokens of plain decoding."""

    num_tokens: int
    promised: float
    """By drafting what was left of its answer, what writing takes not counted."""
    kept: float = 0.0

    def record(self, num_accepted: int, price: float) -> None:
        """Of one drafted round."""
        self.kept += num_accepted - price


@dataclass(slots=True)
class CatchingUp:
    """What came of such promises on one route, by the size of what was written: a power of two.

    Whoever brings a long document asks for other things than most, often for answers that copy, and a route's acceptance,
    of short prompts mostly, promises too much for them.
    """

    promised: dict[int, float] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)

    def record(self, written: WrittenPrompt) -> None:
        """At a request's end."""
        self._add(written.num_tokens, written.promised, written.kept)

    def refuse(self, num_tokens: int) -> None:
        """One that was not worth it: old experience fades, or none would be tried again."""
        self._add(num_tokens, 0.0, 0.0)

    def _add(self, num_tokens: int, promised: float, kept: float) -> None:
        size = num_tokens.bit_length()
        self.promised[size] = self.promised.get(size, 0.0) * _PROMISES_KEPT + promised
        self.kept[size] = self.kept.get(size, 0.0) * _PROMISES_KEPT + kept

    def share(self, num_tokens: int) -> float:
        """Of a promise, what to believe of it."""
        size = num_tokens.bit_length()
        kept, promised = self.kept.get(size, 0.0), self.promised.get(size, 0.0)
        return min(1.0, max(0.0, kept + _PROMISES_WEIGHT) / (promised + _PROMISES_WEIGHT))
