"""Selective distillation (AdaSPEC, arXiv 2510.19779, sections 3.1 and 3.2): a reference draft shows which tokens a small
draft can learn at all, and training keeps only those.

  gain = KL(target || draft) − KL(target || reference), token by token; the largest `select_fraction` of a window teach.

Offline the reference is a distilled copy of the initial draft. Online it is an older self: a snapshot of the average at least
REFERENCE_AGE requests old, taken once the draft has learnt something (alpha at least MIN_ALPHA), because an untrained reference
knows nothing about what can be learnt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from livedraft.config import LearningConfig
from livedraft.drafts.weights import DraftWeights

if TYPE_CHECKING:
    from livedraft.learning.trainer import Trainer

REFERENCE_AGE = 200
MIN_ALPHA = 0.4
CONTROL_SHARE = 10
"""One example in this many keeps all its tokens: what selection drops for good would never be seen again."""


def keep_largest(gain_N: torch.Tensor, fraction: float) -> torch.Tensor:
    """bool_N: the `fraction` of the finite gains that are largest, at least one. −inf marks rows that cannot teach."""
    can_teach_N = gain_N > -torch.inf
    num_kept = min(int(can_teach_N.sum()), max(1, math.ceil(fraction * int(can_teach_N.sum()))))
    keeps_N = torch.zeros_like(can_teach_N)
    if num_kept:
        keeps_N[gain_N.topk(num_kept).indices] = True
    return keeps_N


class Reference:
    """The older self that selection compares with."""

    def __init__(self, config: LearningConfig) -> None:
        self._is_used = config.select_fraction < 1.0
        self._weights: DraftWeights | None = None
        self._next: tuple[int, DraftWeights] | None = None

    def at(self, num_trained: int, alpha: float, trainer: Trainer) -> DraftWeights | None:
        """The reference after `num_trained` requests, `alpha` being the recent acceptance; None: every token teaches."""
        if not self._is_used:
            return None
        if self._next is not None and num_trained - self._next[0] >= REFERENCE_AGE:
            self._weights, self._next = self._next[1], None
        if self._next is None and (self._weights is not None or alpha >= MIN_ALPHA):
            self._next = (num_trained, trainer.snapshot())
        return self._weights
