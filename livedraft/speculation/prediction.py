"""A proposer for a client that knows most of the answer beforehand (an edited file): its own text, one-hot (rule 4)."""

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
        for length in range(len(self._recent), _SHORTEST_MATCH - 1, -1):
            wanted = self._recent[-length:]
            ends = [
                start + length
                for start in range(len(self._token_ids) - length + 1)
                if self._token_ids[start : start + length] == wanted
            ]
            if ends:
                return min(ends, key=lambda end: (end < self._last_cursor, abs(end - self._last_cursor)))
        return None
