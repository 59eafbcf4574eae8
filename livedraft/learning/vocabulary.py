"""Which tokens a draft can say: those the traffic really uses, filled up with the lowest ids.

Counted from training traces only; held-out traces never enter this choice.
"""

from __future__ import annotations

import numpy as np

from livedraft.learning.batches import Example

_TEACHER_TOKENS_COUNTED = 8
"""The target's likeliest tokens at a position count by their probability, so near misses are sayable too."""


class VocabularyUse:
    def __init__(self, vocabulary_size: int) -> None:
        self._mass_V = np.zeros(vocabulary_size)

    def add(self, example: Example) -> None:
        np.add.at(self._mass_V, example.output_token_ids, 1.0)
        top = slice(None, _TEACHER_TOKENS_COUNTED)
        probs = np.exp(example.teacher_log_probs_TK[:, top].astype(np.float64))
        np.add.at(self._mass_V, example.teacher_token_ids_TK[:, top].ravel(), probs.ravel())

    def choose(self, size: int) -> list[int]:
        """The `size` most used tokens, the lowest ids among equals (so unused ones fill up from below)."""
        order = np.lexsort((np.arange(len(self._mass_V)), -self._mass_V))
        return sorted(order[:size].tolist())
