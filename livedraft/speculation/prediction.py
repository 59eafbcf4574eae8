"""What a client that knows most of the answer beforehand (an edited file) expects it to be, proposed one-hot (rule 4)."""

from __future__ import annotations

from collections.abc import Sequence

VERSION = "prediction"
_LONGEST_MATCH, _SHORTEST_MATCH = 8, 2


class Prediction:
    """One request's predicted tokens and where the output stands in them. Lost until the last tokens occur in it again."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
        self._cursor: int | None = 0
        self._recent: list[int] = []
        self._last_cursor = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """Behind each pair of tokens; made once, because a search a round would stall everybody."""
        for end in range(_SHORTEST_MATCH, len(self._token_ids) + 1):
            self._ends.setdefault(tuple(self._token_ids[end - _SHORTEST_MATCH : end]), []).append(end)

    def propose(self, num_tokens: int) -> list[int]:
        """The tokens that follow in the prediction; none while lost."""
        if self._cursor is None:
            return []
        return self._token_ids[self._cursor : self._cursor + num_tokens]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Follow the output: step along while it agrees, look for its last tokens where it does not."""
        for token in token_ids:
            self._recent = [*self._recent[1 - _LONGEST_MATCH :], token]
            if self._cursor is not None and self._token_ids[self._cursor : self._cursor + 1] == [token]:
                self._cursor += 1
                self._last_cursor = self._cursor
            else:
                self._cursor = None
        if self._cursor is None:
            self._cursor = self._find()

    def _find(self) -> int | None:
        """Behind the longest match of the last tokens; among equals the one nearest after where the output was."""
        ends = self._ends.get(tuple(self._recent[-_SHORTEST_MATCH:]), [])
        return max(ends, key=self._fitness, default=None)

    def _fitness(self, end: int) -> tuple[int, bool, int]:
        length = _SHORTEST_MATCH
        while length < min(len(self._recent), end) and self._recent[-length - 1] == self._token_ids[end - length - 1]:
            length += 1
        return length, end >= self._last_cursor, -abs(end - self._last_cursor)
