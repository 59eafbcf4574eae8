"""How far the draft is from the target at one position. Pure functions; each has a float64 reference test, value and
gradient.

A teacher is what a trace keeps: the target's top-K tokens with raw log-probabilities. On a trimmed draft vocabulary only
S = draft vocabulary ∩ teacher's top-K can be compared. With the full vocabulary as K, S is everything and each function
is its textbook form.

  forward_kl     KL of the target renormalised on S from the draft, times the target's mass on S. The draft is not
                 renormalised, so its mass outside S (the tail class) costs too.
  tvd            1 − Σ_S min(target_probs, draft_probs); outside S contributes nothing to the sum.
  neg_log_alpha  −log Σ_S min(target_probs, draft_probs): the logarithm of the acceptance probability (LK losses,
                 2602.23881).
  hybrid         λ forward_kl + (1 − λ) tvd with λ = exp(−3 · mean Σ min), the mean over the batch, no gradient through
                 λ: forward_kl while the draft is weak, tvd (which is acceptance itself) once it is good. tvd alone from
                 a weak start is known to fail (AdaSPEC, table of ablations).

Legend: N positions, K teacher tokens, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from livedraft.config import Loss

MIN_SHARED_MASS = 0.05
"""A position whose target mass on S is below this teaches nothing and is counted."""
_TINY = 1e-12
HYBRID_DECAY = 3.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The draft's and the target's probabilities of the same tokens, on S; zeros elsewhere in the K columns."""

    target_probs_NK: torch.Tensor
    draft_log_probs_NK: torch.Tensor
    is_shared_NK: torch.Tensor

    @property
    def shared_mass_N(self) -> torch.Tensor:
        return self.target_probs_NK.sum(-1)

    @property
    def teaches_N(self) -> torch.Tensor:
        return self.shared_mass_N >= MIN_SHARED_MASS

    @property
    def overlap_N(self) -> torch.Tensor:
        """Σ_S min(target_probs, draft_probs): the acceptance probability, a lower bound under top-K teachers."""
        draft_probs_NK = self.draft_log_probs_NK.exp() * self.is_shared_NK
        return torch.minimum(self.target_probs_NK, draft_probs_NK).sum(-1)


def compare(
    draft_logits_NW: torch.Tensor, teacher_rows_NK: torch.Tensor, teacher_log_probs_NK: torch.Tensor
) -> Comparison:
    """Line up draft and teacher. `teacher_rows_NK` holds the draft row of each teacher token, −1 where it has none."""
    is_shared_NK = teacher_rows_NK >= 0
    # Gather first, normalise after: no [N, W] copy of log-probabilities beside the logits.
    gathered_NK = draft_logits_NW.gather(-1, teacher_rows_NK.clamp(min=0))
    draft_log_probs_NK = gathered_NK - torch.logsumexp(draft_logits_NW, dim=-1, keepdim=True)
    return Comparison(
        target_probs_NK=teacher_log_probs_NK.exp() * is_shared_NK,
        draft_log_probs_NK=draft_log_probs_NK,
        is_shared_NK=is_shared_NK,
    )


def forward_kl(comparison: Comparison) -> torch.Tensor:
    target_NK = comparison.target_probs_NK
    mass_N1 = target_NK.sum(-1, keepdim=True)
    log_target_NK = (target_NK.clamp(min=_TINY) / mass_N1.clamp(min=_TINY)).log()
    return (target_NK * (log_target_NK - comparison.draft_log_probs_NK)).sum(-1)


def tvd(comparison: Comparison) -> torch.Tensor:
    return 1.0 - comparison.overlap_N


def neg_log_alpha(comparison: Comparison) -> torch.Tensor:
    return -comparison.overlap_N.clamp(min=_TINY).log()


def hybrid(comparison: Comparison) -> torch.Tensor:
    weight = torch.exp(-HYBRID_DECAY * comparison.overlap_N.mean().detach())
    return weight * forward_kl(comparison) + (1.0 - weight) * tvd(comparison)


LOSS_FUNCTIONS: dict[Loss, Callable[[Comparison], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "neg_log_alpha": neg_log_alpha,
    "hybrid": hybrid,
}
"""Each maps a comparison to one number a position; the caller drops positions that teach nothing and averages."""
