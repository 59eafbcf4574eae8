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

from collections.abc import Sequence

import torch

from livedraft.device import on_device
from livedraft.records import Proposal, SamplingParams, Verdict
from livedraft.sampling import ACCEPT, RECOVER, draw, draw_rows, filtered_logits, gumbel_noise, logits_to_probs, uniform


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
    for row, token in enumerate(proposal.draft_token_ids if proposal else []):
        position = first_position + row
        assert proposal is not None
        target_prob = target_probs_RV[row, token].item()
        draft_prob = 1.0
        if proposal.draft_probs_KW is not None:
            draft_prob = proposal.draft_probs_KW[row, proposal.draft_row_ids[row]].item()
        if uniform(seed, position, ACCEPT) * draft_prob < target_prob:
            output.append(token)
            continue
        recovered = draw(residual(target_probs_RV[row], proposal, row), uniform(seed, position, RECOVER))
        return Verdict(num_accepted=row, output_token_ids=[*output, recovered])
    bonus = draw(target_probs_RV[-1], uniform(seed, first_position + len(output), RECOVER))
    return Verdict(num_accepted=len(output), output_token_ids=[*output, bonus])


Case = tuple[torch.Tensor, Proposal | None, SamplingParams, int, int]
"""The arguments of `verify`."""


def verify_together(cases: Sequence[Case]) -> list[Verdict]:
    """`verify` for requests without a seed, all read back at once: on a GPU every reading waits for all that was launched."""
    if not cases:
        return []
    numbers = [
        rejection_numbers(logits_to_probs(logits_RV, sampling), proposal, seed, first_position)
        for logits_RV, proposal, sampling, seed, first_position in cases
    ]
    rows = torch.cat(numbers, dim=1).tolist()
    verdicts, end = [], 0
    for logits_RV, proposal, _, seed, first_position in cases:
        start, end = end, end + logits_RV.shape[0]
        verdicts.append(verdict_by_numbers([row[start:end] for row in rows], proposal, seed, first_position))
    return verdicts


def rejection_numbers(
    target_probs_RV: torch.Tensor, proposal: Proposal | None, seed: int, first_position: int
) -> torch.Tensor:
    """All that `verify_by_rejection` may need, float64 [3, R], without reading anything back: the target's and the draft's
    probability of each row's drafted token, and the token drawn where the output ends at that row."""
    R, device = target_probs_RV.shape[0], target_probs_RV.device
    drafted = proposal.draft_token_ids if proposal else []
    numbers_3R = torch.ones(3, R, dtype=torch.float64, device=device)
    last_RV = target_probs_RV
    if proposal is not None and drafted:
        tokens_K1 = on_device(drafted, device)[:, None]
        numbers_3R[0, :-1] = target_probs_RV[:-1].gather(-1, tokens_K1)[:, 0]
        residual_KV = target_probs_RV[:-1].clone()
        if proposal.draft_probs_KW is None:
            residual_KV.scatter_(-1, tokens_K1, 0.0)
        else:
            rows_K1 = on_device(proposal.draft_row_ids, device)[:, None]
            numbers_3R[1, :-1] = proposal.draft_probs_KW.gather(-1, rows_K1)[:, 0]
            columns = slice(None) if proposal.draft_to_target_W is None else proposal.draft_to_target_W
            residual_KV[:, columns] -= proposal.draft_probs_KW
        residual_KV.clamp_(min=0.0)
        has_mass_K1 = residual_KV.sum(-1, keepdim=True) > 0.0
        last_RV = torch.cat([torch.where(has_mass_K1, residual_KV, target_probs_RV[:-1]), target_probs_RV[-1:]])
    chances = [uniform(seed, first_position + row, RECOVER) for row in range(R)]
    numbers_3R[2] = draw_rows(last_RV, on_device(chances, device, torch.float64)).double()
    return numbers_3R


def verdict_by_numbers(
    numbers_3R: list[list[float]], proposal: Proposal | None, seed: int, first_position: int
) -> Verdict:
    """`verify_by_rejection` on numbers that were read back."""
    drafted = proposal.draft_token_ids if proposal else []
    num_accepted = 0
    while num_accepted < len(drafted):
        target_prob, draft_prob = numbers_3R[0][num_accepted], numbers_3R[1][num_accepted]
        if uniform(seed, first_position + num_accepted, ACCEPT) * draft_prob >= target_prob:
            break
        num_accepted += 1
    last = int(numbers_3R[2][num_accepted])
    return Verdict(num_accepted=num_accepted, output_token_ids=[*drafted[:num_accepted], last])


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
