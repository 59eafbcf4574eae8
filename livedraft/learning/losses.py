"""How far the draft is from the target at one position. Pure functions; each has a float64 reference test, value and
gradient.

A teacher is what a trace keeps: the target's top-K tokens with raw log-probabilities. On a trimmed draft vocabulary only
S = draft vocabulary ∩ teacher's top-K can be compared. With the full vocabulary as K, S is everything and each function
is its textbook form.

  forward_kl     KL of the target renormalised on S from the draft, times the target's mass on S. The draft is not
                 renormalised, so its mass outside S (the tail class) costs too.
  reverse_kl     KL of the draft from the target, on S and one class more: the draft's and the target's mass outside S.
  jsd            β KL(target || mixture) + (1 − β) KL(draft || mixture) on the same classes, the mixture being β target +
                 (1 − β) draft (DistillSpec, 2310.08461; β is the setting jsd_beta).
  cross_entropy  −log of the draft's probability of the token that was served: plain fine-tuning on the target's texts. A token
                 the draft does not know teaches nothing.
  tvd            1 − Σ_S min(target_probs, draft_probs); outside S contributes nothing to the sum.
  neg_log_alpha  −log Σ_S min(target_probs, draft_probs): the logarithm of the acceptance probability (LK losses,
                 2602.23881).
  hybrid         λ forward_kl + (1 − λ) tvd with λ = exp(−3 · mean Σ min), the mean over the batch, no gradient through
                 λ: forward_kl while the draft is weak, tvd (which is acceptance itself) once it is good. tvd or reverse_kl
                 alone from a weak start are known to fail (AdaSPEC, table of ablations).

Legend: N positions, K teacher tokens, C = K + 1 classes with the tail, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    label_log_probs_N: torch.Tensor | None = None
    """The draft's, of the tokens that were served; zero where it does not know the token."""

    @property
    def shared_mass_N(self) -> torch.Tensor:
        return self.target_probs_NK.sum(-1)

    @property
    def teaches_N(self) -> torch.Tensor:
        return self.shared_mass_N >= MIN_SHARED_MASS

    @property
    def with_tails(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(target probs, draft probs) [N, K + 1] and their logarithms: the last class is all that is not in S."""
        draft_NK = self.draft_log_probs_NK.exp() * self.is_shared_NK
        both = [
            torch.cat([probs_NK, 1.0 - probs_NK.sum(-1, keepdim=True)], -1).clamp(min=_TINY)
            for probs_NK in (self.target_probs_NK, draft_NK)
        ]
        return both[0], both[1], both[0].log(), both[1].log()

    @property
    def overlap_N(self) -> torch.Tensor:
        """Σ_S min(target_probs, draft_probs): the acceptance probability, a lower bound under top-K teachers."""
        draft_probs_NK = self.draft_log_probs_NK.exp() * self.is_shared_NK
        return torch.minimum(self.target_probs_NK, draft_probs_NK).sum(-1)


def compare(
    draft_logits_NW: torch.Tensor,
    teacher_rows_NK: torch.Tensor,
    teacher_log_probs_NK: torch.Tensor,
    label_rows_N: torch.Tensor | None = None,
) -> Comparison:
    """Line up draft and teacher. `teacher_rows_NK` holds the draft row of each teacher token, −1 where it has none;
    `label_rows_N` that of the token served."""
    is_shared_NK = teacher_rows_NK >= 0
    # Gather first, normalise after: no [N, W] copy of log-probabilities beside the logits.
    gathered_NK = draft_logits_NW.gather(-1, teacher_rows_NK.clamp(min=0))
    normaliser_N1 = torch.logsumexp(draft_logits_NW, dim=-1, keepdim=True)
    draft_log_probs_NK = gathered_NK - normaliser_N1
    label_log_probs_N = None
    if label_rows_N is not None:
        label_N1 = draft_logits_NW.gather(-1, label_rows_N.clamp(min=0)[:, None]) - normaliser_N1
        label_log_probs_N = torch.where(label_rows_N >= 0, label_N1[:, 0], 0.0)
    return Comparison(
        target_probs_NK=teacher_log_probs_NK.exp() * is_shared_NK,
        draft_log_probs_NK=draft_log_probs_NK,
        is_shared_NK=is_shared_NK,
        label_log_probs_N=label_log_probs_N,
    )


def forward_kl(comparison: Comparison) -> torch.Tensor:
    target_NK = comparison.target_probs_NK
    mass_N1 = target_NK.sum(-1, keepdim=True)
    log_target_NK = (target_NK.clamp(min=_TINY) / mass_N1.clamp(min=_TINY)).log()
    return (target_NK * (log_target_NK - comparison.draft_log_probs_NK)).sum(-1)


def reverse_kl(comparison: Comparison) -> torch.Tensor:
    _, draft_NC, log_target_NC, log_draft_NC = comparison.with_tails
    return (draft_NC * (log_draft_NC - log_target_NC)).sum(-1)


def jsd(comparison: Comparison, beta: float = 0.5) -> torch.Tensor:
    target_NC, draft_NC, log_target_NC, log_draft_NC = comparison.with_tails
    log_mixture_NC = (beta * target_NC + (1.0 - beta) * draft_NC).log()
    to_target_N = (target_NC * (log_target_NC - log_mixture_NC)).sum(-1)
    return beta * to_target_N + (1.0 - beta) * (draft_NC * (log_draft_NC - log_mixture_NC)).sum(-1)


def cross_entropy(comparison: Comparison) -> torch.Tensor:
    assert comparison.label_log_probs_N is not None
    return -comparison.label_log_probs_N


def tvd(comparison: Comparison) -> torch.Tensor:
    return 1.0 - comparison.overlap_N


def neg_log_alpha(comparison: Comparison) -> torch.Tensor:
    return -comparison.overlap_N.clamp(min=_TINY).log()


def hybrid(comparison: Comparison) -> torch.Tensor:
    weight = torch.exp(-HYBRID_DECAY * comparison.overlap_N.mean().detach())
    return weight * forward_kl(comparison) + (1.0 - weight) * tvd(comparison)


LOSS_FUNCTIONS: dict[Loss, Callable[[Comparison], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "neg_log_alpha": neg_log_alpha,
    "hybrid": hybrid,
    "cross_entropy": cross_entropy,
}
"""Each maps a comparison to one number a position; the caller drops positions that teach nothing and averages."""


def loss_function(loss: Loss, *, jsd_beta: float) -> Callable[[Comparison], torch.Tensor]:
    """The loss of a name, as the settings have it."""
    return partial(jsd, beta=jsd_beta) if loss == "jsd" else LOSS_FUNCTIONS[loss]
