"""Verification: which proposed tokens stand, and what replaces the first that does not. Pure functions.

The lossless rules this room keeps (each has a test):

1. One logits -> probs function with the same parameters for both models. Temperature 0 is one-hot, near ties too.
2. draft_probs are those recorded when the tokens were drawn, float32; never recomputed.
3. A drawn token is never discarded by looking at it.
4. A proposer without probabilities is one-hot. A trimmed draft vocabulary is probability 0 elsewhere.
5. A residual that sums to zero: sample the target.
6. What depends on the prefix is applied per position with the hypothetical prefix.
7. Randomness is by counter: (seed, output position, purpose). A request with a seed is verified by shared Gumbel noise
   and so equals plain decoding token for token; one without uses rejection sampling, equal in distribution.
8. The version that proposes never affects the output distribution, only speed.

Rejection sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318), for each drafted token x in order:
  (1) accept x when u < target_probs(x) / draft_probs(x), u uniform in [0, 1);
  (2) on the first rejection draw the recovered token from max(0, target_probs - draft_probs), normalised, and stop;
  (3) when all are accepted draw the bonus token from the target's distribution one position further.
Plain decoding is the same code with no drafted token: step (3) alone.

Legend: K drafted positions, R = K + 1 target rows of one request, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import torch

from livedraft.device import on_device
from livedraft.records import Proposal, SamplingParams, Verdict
from livedraft.sampling import ACCEPT, RECOVER, draw, filtered_logits, gumbel_noise, logits_to_probs, uniform


def verify(
    target_logits_RV: torch.Tensor, proposal: Proposal | None, sampling: SamplingParams, seed: int, first_position: int
) -> Verdict:
    """Judge one request's proposal; None or an empty one is plain decoding.

    target_logits_RV: float32, row i is the target's answer after i drafted tokens. `seed` is the request's own, or the
    engine's private one for a request without. `first_position` is the output position of row 0.
    """
    draft_token_ids = proposal.draft_token_ids if proposal else []
    assert target_logits_RV.shape[0] == len(draft_token_ids) + 1, "one target row a drafted token, and one more"
    if sampling.is_greedy:
        return verify_exact(target_logits_RV.argmax(-1).tolist(), draft_token_ids)
    if sampling.seed is not None:
        return verify_exact(gumbel_choice(target_logits_RV, sampling, seed, first_position), draft_token_ids)
    return verify_by_rejection(logits_to_probs(target_logits_RV, sampling), proposal, seed, first_position)


def verify_exact(target_choice_R: list[int], draft_token_ids: list[int]) -> Verdict:
    """The target's own choice at each row is fixed (greedy, or shared noise): accept while the draft made the same."""
    num_accepted = 0
    for drafted, chosen in zip(draft_token_ids, target_choice_R, strict=False):
        if drafted != chosen:
            break
        num_accepted += 1
    return Verdict(num_accepted=num_accepted, output_token_ids=target_choice_R[: num_accepted + 1])


def gumbel_choice(
    logits_RV: torch.Tensor,
    sampling: SamplingParams,
    seed: int,
    first_position: int,
    *,
    target_vocabulary_size: int | None = None,
    draft_to_target_W: torch.Tensor | None = None,
) -> list[int]:
    """argmax(log probs + G) at each row, G depending on (seed, position, token) only: a sample of the distribution.

    A draft with a trimmed vocabulary names the target's size and its own target ids, and so reads the same noise; the
    result is then in its own rows.
    """
    R, V = logits_RV.shape
    positions = range(first_position, first_position + R)
    noise_RV = gumbel_noise(seed, positions, target_vocabulary_size or V).to(logits_RV.device)
    if draft_to_target_W is not None:
        noise_RV = noise_RV[:, draft_to_target_W]
    return (filtered_logits(logits_RV, sampling) + noise_RV).argmax(-1).tolist()


def verify_by_rejection(
    target_probs_RV: torch.Tensor, proposal: Proposal | None, seed: int, first_position: int
) -> Verdict:
    """Steps (1) to (3) of the module's story."""
    output: list[int] = []
    drafted = proposal.draft_token_ids if proposal else []
    target_probs = _chosen(target_probs_RV[: len(drafted)], drafted)
    draft_probs = [1.0] * len(drafted)
    if proposal is not None and proposal.draft_probs_KW is not None:
        draft_probs = _chosen(proposal.draft_probs_KW, proposal.draft_row_ids)
    for row, (token, target_prob, draft_prob) in enumerate(zip(drafted, target_probs, draft_probs, strict=True)):
        position = first_position + row
        if uniform(seed, position, ACCEPT) * draft_prob < target_prob:
            output.append(token)
            continue
        assert proposal is not None
        recovered = draw(residual(target_probs_RV[row], proposal, row), uniform(seed, position, RECOVER))
        return Verdict(num_accepted=row, output_token_ids=[*output, recovered])
    bonus = draw(target_probs_RV[-1], uniform(seed, first_position + len(output), RECOVER))
    return Verdict(num_accepted=len(output), output_token_ids=[*output, bonus])


def _chosen(probs_RV: torch.Tensor, columns_R: list[int]) -> list[float]:
    """One number of each row, read together: on a GPU every reading waits."""
    if not columns_R:
        return []
    return probs_RV.gather(-1, on_device(columns_R, probs_RV.device)[:, None])[:, 0].tolist()


def residual(target_probs_V: torch.Tensor, proposal: Proposal, row: int) -> torch.Tensor:
    """max(0, target_probs - draft_probs), unnormalised; the target itself where that has no mass (rule 5)."""
    residual_V = target_probs_V.clone()
    if proposal.draft_probs_KW is None:
        residual_V[proposal.draft_token_ids[row]] = 0.0
    elif proposal.draft_to_target_W is None:
        residual_V -= proposal.draft_probs_KW[row]
    else:
        residual_V[proposal.draft_to_target_W] -= proposal.draft_probs_KW[row]
    residual_V.clamp_(min=0.0)
    return residual_V if residual_V.sum().item() > 0.0 else target_probs_V
