"""Selective distillation (AdaSPEC, arXiv 2510.19779, sections 3.1 and 3.2): a reference draft shows which tokens a small
draft can learn at all, and training keeps only those.

  gain = KL(target || draft) − KL(target || reference), token by token; the largest `select_fraction` of a window teach.

Offline the reference is a distilled copy of the initial draft. Online it is an older self: a snapshot of the average at least
REFERENCE_AGE requests old, taken once the draft has learnt something (alpha at least MIN_ALPHA), because an untrained reference
knows nothing about what can be learnt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a training step keeps of each window of positions."""

    reference: DraftWeights
    fraction: float
    keep: Literal["top", "bottom", "random"] = "top"
    """`bottom` and `random` are the paper's ablations."""
    control_share: int = 0
    """One example in so many keeps all its positions; 0 is none."""

    def chosen(self, gain_N: torch.Tensor, seed: int) -> torch.Tensor:
        """bool_N by the gains of a window; `random` is fixed by the seed."""
        if self.keep == "random":
            noise_N = torch.rand(len(gain_N), generator=torch.Generator().manual_seed(seed))
            gain_N = torch.where(gain_N > -torch.inf, noise_N, gain_N)
        elif self.keep == "bottom":
            gain_N = torch.where(gain_N > -torch.inf, -gain_N, gain_N)
        return keep_largest(gain_N, self.fraction)


class Reference:
    """The older self that selection compares with online."""

    def __init__(self, config: LearningConfig) -> None:
        self._fraction = config.select_fraction
        self._weights: DraftWeights | None = None
        self._next: tuple[int, DraftWeights] | None = None

    def at(self, num_trained: int, alpha: float, trainer: Trainer) -> Selection | None:
        """The selection after `num_trained` requests, `alpha` being the recent acceptance; None: every token teaches."""
        if self._fraction == 1.0:
            return None
        if self._next is not None and num_trained - self._next[0] >= REFERENCE_AGE:
            self._weights, self._next = self._next[1], None
        if self._next is None and (self._weights is not None or alpha >= MIN_ALPHA):
            self._next = (num_trained, trainer.snapshot())
        if self._weights is None:
            return None
        return Selection(reference=self._weights, fraction=self._fraction, control_share=CONTROL_SHARE)
