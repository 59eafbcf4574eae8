"""What was said before is often said again: the longest match of a request's last tokens, in its own text and in recent
traffic, proposes what followed there. One-hot (lossless rule 4), free of any model, at work from the first request.

`History` is a bounded memory of texts with a match finder in the manner of LZ77: each position links to the one before it with
the same last few tokens, so a search looks at a few candidates and no tree is kept. `Traffic` is one shared by all
requests, `SuffixMatcher` one request's own and what it finds. `MatchStatistics` says how often a match of some length is right;
it learns from every committed token, proposed or not, because a guess can be compared with what was said without proposing it.
"""

from __future__ import annotations

import copy
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from livedraft.speculation.own_acceptance import OwnAcceptance

VERSION = "suffix"
OWN_MIN_MATCH, TRAFFIC_MIN_MATCH = 1, 3
"""Tokens that must agree: within its own text one is enough to be worth a look (docs/experiments.md)."""
_LONGEST_MATCH = 64
_CANDIDATES = 24
"""Newest occurrences looked at; long matches of old ones are rarer than they are dear."""
_LOOKED_AT = 8 * _CANDIDATES
"""With those that may not be used, of other clients or too old."""
_BREAK = -1
"""Stands between two texts: equal to no token."""
_NOWHERE = -1
_TABLE_BITS = 20
_LENGTH_BINS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 40)
_PRIOR = (0.1, 0.25, 0.35, 0.42, 0.48, 0.54, 0.62, 0.7, 0.78, 0.84, 0.9)
_PRIOR_WEIGHT = 12.0
_MEMORY = 600.0
"""Observations after which old ones have faded."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Where the last tokens occurred before, and what followed there."""

    length: int
    continuation: tuple[int, ...]
    is_own: bool


class History:
    """The last `capacity` tokens of texts put in one after the other. Matches have at least `min_match` tokens."""

    def __init__(self, capacity: int, *, min_match: int = TRAFFIC_MIN_MATCH, table_bits: int = _TABLE_BITS) -> None:
        self._capacity, self._min_match = capacity, min_match
        self._mask = (1 << table_bits) - 1
        self._tokens = array("i", [_BREAK]) * capacity
        self._previous = array("q", [_NOWHERE]) * capacity
        self._heads = array("q", [_NOWHERE]) * (1 << table_bits)
        self.end = 0
        """Tokens ever put in; position p lies at index p modulo the capacity."""

    def copied(self) -> History:
        """Whole arrays at once: putting the tokens in again would take a second."""
        other = copy.copy(self)
        other._tokens, other._previous, other._heads = self._tokens[:], self._previous[:], self._heads[:]
        return other

    @property
    def start(self) -> int:
        """The oldest position that is still there."""
        return max(0, self.end - self._capacity)

    def extend(self, token_ids: Sequence[int]) -> None:
        """More of the text that was put in last."""
        window = self.last(self._min_match)
        for token in token_ids:
            self._tokens[self.end % self._capacity] = token
            self.end += 1
            window = [*window[1 - self._min_match or len(window) :], token]
            slot = self._slot(window)
            if slot is not None:
                # The link of a position says where the text before it occurred last.
                self._previous[(self.end - 1) % self._capacity] = self._heads[slot]
                self._heads[slot] = self.end

    def break_off(self) -> None:
        """The text put in last is whole."""
        self.extend([_BREAK])

    def last(self, count: int) -> list[int]:
        return self.read(max(self.start, self.end - count), self.end)

    def read(self, start: int, end: int) -> list[int]:
        """The tokens at [start, end), which must all be there."""
        first, last = start % self._capacity, (end - 1) % self._capacity + 1
        if end <= start:
            return []
        if first < last:
            return self._tokens[first:last].tolist()
        return self._tokens[first:].tolist() + self._tokens[:last].tolist()

    def _slot(self, tokens: Sequence[int]) -> int | None:
        if len(tokens) < self._min_match or _BREAK in tokens:
            return None
        return hash(tuple(tokens)) & self._mask

    def find(self, context: Sequence[int], is_allowed: Callable[[int], bool] = lambda end: True) -> tuple[int, int]:
        """(tokens that agree, position behind them) of the longest match of the context's end that something follows; the
        newest of equals; (0, 0) without one. `is_allowed` is asked about positions."""
        best_length, best_end = self._min_match - 1, _NOWHERE
        slot = self._slot(context[-self._min_match :])
        position = _NOWHERE if slot is None else self._heads[slot]
        num_compared = 0
        for _ in range(_LOOKED_AT):
            # A link may lead to what has been overwritten since, or back into a later text: older is always smaller.
            if position == _NOWHERE or position - self._min_match < self.start:
                break
            if position < self.end and is_allowed(position):
                length = self._agreement(context, position)
                if length > best_length and self._tokens[position % self._capacity] != _BREAK:
                    best_length, best_end = length, position
                num_compared += 1
                if num_compared == _CANDIDATES or best_length == min(_LONGEST_MATCH, len(context)):
                    break
            older = self._previous[(position - 1) % self._capacity]
            position = older if older < position else _NOWHERE
        return (best_length, best_end) if best_end != _NOWHERE else (0, 0)

    def _agreement(self, context: Sequence[int], end: int) -> int:
        """How many tokens before `end` are the context's last ones."""
        most = min(_LONGEST_MATCH, len(context), end - self.start)
        length = 0
        while length < most and self._tokens[(end - 1 - length) % self._capacity] == context[-1 - length]:
            length += 1
        return length

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """Up to `count` tokens from a position on, none past the end of its text."""
        tokens = self.read(position, min(self.end, position + count))
        return tuple(tokens[: tokens.index(_BREAK)] if _BREAK in tokens else tokens)


@dataclass(frozen=True)
class _Text:
    """A finished request's place in the traffic."""

    start: int
    client_key: str
    at: float


class Traffic:
    """Recent finished requests' texts, shared by all requests, or by each client's own. For the engine's thread."""

    def __init__(
        self,
        capacity: int,
        *,
        is_per_client: bool = False,
        max_age_seconds: float = float("inf"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`capacity` in tokens. With `is_per_client` a client finds its own requests' texts alone, and one that does not
        name itself none."""
        self._capacity, self._is_per_client, self._max_age, self._clock = (
            capacity,
            is_per_client,
            max_age_seconds,
            clock,
        )
        self.statistics = MatchStatistics()
        """Of matches on this route, in a request's own text and here: numbers alone, which deletion leaves."""
        self.forget()

    def forget(self) -> None:
        """All of it."""
        self._history = History(max(1, self._capacity))
        self._texts: list[_Text] = []

    def copied(self) -> Traffic:
        """The same texts for another route: each goes its own way from here."""
        other = copy.copy(self)
        other._history, other._texts = self._history.copied(), list(self._texts)
        other.statistics = copy.deepcopy(self.statistics)
        return other

    def take_over(self, other: Traffic) -> None:
        """The other's texts, and after them these."""
        ends = [text.start - 1 for text in self._texts[1:]] + [self._history.end - 1]
        for text, end in zip(self._texts, ends, strict=False):
            if text.start >= self._history.start:
                other.add(self._history.read(text.start, end), text.client_key, text.at)
        self._history, self._texts = other._history, other._texts

    @property
    def num_tokens(self) -> int:
        return self._history.end - self._history.start

    def add(self, token_ids: Sequence[int], client_key: str = "", at: float | None = None) -> None:
        """A finished request's prompt and output."""
        self._texts.append(_Text(self._history.end, client_key, self._clock() if at is None else at))
        self._history.extend(token_ids)
        self._history.break_off()
        if self._texts[0].start < self._history.start - self._capacity // 8:
            first = bisect_right(self._texts, self._history.start, key=lambda text: text.start) - 1
            self._texts = self._texts[max(0, first) :]

    def find(self, context: Sequence[int], client_key: str, count: int) -> Match | None:
        is_allowed = self._is_allowed(client_key)
        length, end = self._history.find(context, is_allowed) if is_allowed else (0, 0)
        if not length:
            return None
        return Match(length=length, continuation=self._history.following(end, count), is_own=False)

    def _is_allowed(self, client_key: str) -> Callable[[int], bool] | None:
        """None: this client may find nothing."""
        if not self._texts or (self._is_per_client and not client_key):
            return None
        oldest = self._clock() - self._max_age

        def is_allowed(position: int) -> bool:
            index = bisect_right(self._texts, position - 1, key=lambda text: text.start) - 1
            if index < 0:
                return False
            text = self._texts[index]
            return text.at >= oldest and (not self._is_per_client or text.client_key == client_key)

        if not self._is_per_client and self._texts[0].at >= oldest:
            return lambda position: True
        return is_allowed


class MatchStatistics:
    """How often the token behind a match is the next one, by the match's length and where it was found."""

    def __init__(self) -> None:
        self._seen = {is_own: [_PRIOR_WEIGHT] * len(_PRIOR) for is_own in (True, False)}
        self._right = {is_own: [_PRIOR_WEIGHT * share for share in _PRIOR] for is_own in (True, False)}

    def record(self, match: Match, output: Sequence[int]) -> None:
        """What was said after the match; a longer one with every token it had right."""
        decay = 1.0 - 1.0 / _MEMORY
        seen, right = self._seen[match.is_own], self._right[match.is_own]
        for offset, (guess, token) in enumerate(zip(match.continuation, output, strict=False)):
            index = _bin(match.length + offset)
            seen[index] = seen[index] * decay + 1.0
            right[index] = right[index] * decay + (guess == token)
            if guess != token:
                break

    def judged(self, match: Match, output: Sequence[int]) -> tuple[float, float]:
        """(tokens of the match that were right, how many were expected to be), up to the first wrong one."""
        right, expected = 0.0, 0.0
        for offset, (guess, token) in enumerate(zip(match.continuation, output, strict=False)):
            expected += self.acceptance(match, offset)
            if guess != token:
                break
            right += 1.0
        return right, expected

    def acceptance(self, match: Match, offset: int) -> float:
        """Chance that the continuation's token at `offset` is right, once those before it were."""
        index = _bin(match.length + offset)
        return self._right[match.is_own][index] / self._seen[match.is_own][index]


def _bin(length: int) -> int:
    return max(0, bisect_right(_LENGTH_BINS, length) - 1)


@dataclass(kw_only=True)
class SuffixMatcher:
    """One request's own text, and the match that stands for its coming round."""

    traffic: Traffic
    client_key: str
    longest: int
    """Tokens a proposal can have."""
    own: OwnAcceptance = field(default_factory=OwnAcceptance)
    """How this request's matches do beside what the route's say of them."""
    history: History = field(init=False)
    match: Match | None = None
    _found: list[Match] = field(default_factory=list)
    _is_current: bool = False

    def start(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """With the prompt. Its text can grow by `max_tokens`."""
        self.history = History(len(token_ids) + max_tokens + 1, min_match=OWN_MIN_MATCH, table_bits=12)
        self.history.extend(token_ids)

    def find(self) -> Match | None:
        """The likelier one of both to go on rightly; the request's own of equals."""
        if not self._is_current:
            context = self.history.last(_LONGEST_MATCH)
            found = (self._own(context), self.traffic.find(context, self.client_key, self.longest))
            self._found = [match for match in found if match is not None]
            acceptance = self.traffic.statistics.acceptance
            self.match = max(self._found, key=lambda match: acceptance(match, 0), default=None)
            self._is_current = True
        return self.match

    def _own(self, context: Sequence[int]) -> Match | None:
        length, end = self.history.find(context)
        if not length:
            return None
        tokens = self.history.following(end, self.longest)
        # A match that reaches up to now goes on as it began: the text repeats itself.
        tokens = (tokens * self.longest)[: self.longest] if end + len(tokens) == self.history.end else tokens
        return Match(length=length, continuation=tokens, is_own=True)

    def commit(self, output: Sequence[int]) -> None:
        """What the round came to."""
        if self._is_current and self.match is not None:
            self.own.record(*self.traffic.statistics.judged(self.match, output))
        for match in self._found if self._is_current else []:
            self.traffic.statistics.record(
                match, output
            )  # also the one that was not chosen, or it would never be again
        self.history.extend(output)
        self._is_current = False
