"""Which tokens a draft can say: those the traffic really uses, and some of the lowest ids beside them.

A smaller head makes every draft step and every training step cheaper, so the head is no larger than the traffic asks for.

Counted from training traces only; held-out traces never enter this choice.
"""

from __future__ import annotations

import numpy as np

from livedraft.learning.batches import Example

_TEACHER_TOKENS_COUNTED = 8
"""The target's likeliest tokens at a position count by their probability, so near misses are sayable too."""


_MIN_USE = 0.5
"""A token counts as used when it was said, or when its probabilities sum to this."""
_SPARE, _STEP = 1024, 1024
"""Room for tokens not seen yet, and what the size is rounded up to, so that it changes seldom."""


class VocabularyUse:
    def __init__(self, vocabulary_size: int) -> None:
        self._mass_V = np.zeros(vocabulary_size)

    def add(self, example: Example) -> None:
        np.add.at(self._mass_V, example.output_token_ids, 1.0)
        top = slice(None, _TEACHER_TOKENS_COUNTED)
        probs = np.exp(example.teacher_log_probs_TK[:, top].astype(np.float64))
        np.add.at(self._mass_V, example.teacher_token_ids_TK[:, top].ravel(), probs.ravel())

    def used(self) -> list[tuple[int, float]]:
        """For a checkpoint: (token, mass) of all that was seen."""
        seen = np.flatnonzero(self._mass_V)
        return list(zip(seen.tolist(), self._mass_V[seen].tolist(), strict=True))

    def restore(self, used: list[tuple[int, float]]) -> None:
        for token, mass in used:
            self._mass_V[token] = mass

    def choose(self, limit: int) -> list[int]:
        """The tokens of the next draft, at most `limit`: the most used ones, the lowest ids among equals (so unused ones
        fill up from below)."""
        num_used = int(np.count_nonzero(self._mass_V >= _MIN_USE))
        size = min(limit, -(-(num_used + _SPARE) // _STEP) * _STEP)
        order = np.lexsort((np.arange(len(self._mass_V)), -self._mass_V))
        return sorted(order[:size].tolist())
