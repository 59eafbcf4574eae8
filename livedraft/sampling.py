"""Logits to probabilities, and randomness by counter. ONE function serves target, draft, trainer and metrics.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from livedraft.records import SamplingParams, TokenLogprobs

# What a random number is for (lossless rule 7). Different purposes at one position are independent.
DRAFT_DRAW, ACCEPT, RECOVER, SHARED_NOISE = 1, 2, 3, 4

_MASK = (1 << 64) - 1


def logits_to_probs(logits_RV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The distribution one request samples from: float32 [R, V], rows sum to 1.

    Temperature 0 is one-hot at the argmax (the lowest id among equals), also for near ties. Filters act in the usual
    order: temperature, top_k, top_p, min_p.
    """
    logits_RV = logits_RV.float()
    if sampling.is_greedy:
        return torch.zeros_like(logits_RV).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(filtered_logits(logits_RV, sampling), dim=-1)


def filtered_logits(logits_RV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits after temperature, with everything top_k, top_p and min_p exclude at -inf. Temperature must not be 0."""
    assert not sampling.is_greedy
    V = logits_RV.shape[-1]
    logits_RV = at_temperature(logits_RV, sampling.temperature)
    if 0 < sampling.top_k < V:
        threshold_R1 = logits_RV.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        probs_RV = sorted_RV.softmax(-1)
        # A token stays while the mass before it is below top_p, so the first always stays.
        excluded_RV = (probs_RV.cumsum(-1) - probs_RV) >= sampling.top_p
        excluded_RV[..., 0] = False
        logits_RV = logits_RV.masked_fill(excluded_RV.scatter(-1, order_RV, excluded_RV), -torch.inf)
    if sampling.min_p > 0.0:
        # Logits are relative to the maximum already: p >= min_p * p_max is logit >= log(min_p).
        logits_RV = logits_RV.masked_fill(logits_RV < torch.tensor(sampling.min_p).log().item(), -torch.inf)
    return logits_RV


def at_temperature(logits_RV: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """Relative to each row's maximum, which a tiny temperature must not overflow; a tensor is [R, 1]."""
    return (logits_RV.float() - logits_RV.amax(-1, keepdim=True)) / temperature


def counter_key(seed: int, position: int, purpose: int) -> int:
    """64 well-mixed bits from (seed, output position, purpose): the same whatever was drawn before (SplitMix64)."""
    state = seed & _MASK
    for word in (position, purpose):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, position: int, purpose: int) -> float:
    """A uniform number in [0, 1)."""
    return (counter_key(seed, position, purpose) >> 11) * 2.0**-53


def draw(probs_V: torch.Tensor, u: float) -> int:
    """Inverse-CDF draw from (not necessarily normalised) probabilities with one uniform number.

    Never returns a token of probability zero. float64 because a float32 running sum over 50,000 tokens drifts.
    """
    cumulative_V = probs_V.double().cumsum(-1)
    total = cumulative_V[-1].item()
    assert total > 0.0, "cannot draw from a distribution without mass"
    index = int(torch.searchsorted(cumulative_V, u * total, right=True))
    if index >= len(probs_V) or probs_V[index] <= 0.0:
        index = int(torch.searchsorted(cumulative_V, total, right=False))  # the last token with mass
    return index


def draw_rows(probs_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """`draw` for each row, without reading anything back: int64 [R]. A row without mass gives some token or other."""
    cumulative_RV = probs_RV.double().cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    index_R = (cumulative_RV <= u_R[:, None] * total_R1).sum(-1)
    last_R = (cumulative_RV < total_R1).sum(-1)  # the last token with mass
    inside_R = index_R.clamp(max=probs_RV.shape[-1] - 1)
    has_mass_R = (inside_R == index_R) & (probs_RV.gather(-1, inside_R[:, None])[:, 0] > 0.0)
    return torch.where(has_mass_R, index_R, last_R).clamp(max=probs_RV.shape[-1] - 1)


def gumbel_noise(seed: int, positions: Sequence[int], vocabulary_size: int) -> torch.Tensor:
    """Gumbel noise [R, V] shared by target and draft at the given output positions of a seeded request (rule 7).

    The noise of token v at a position depends on (seed, position, v) only, so a trimmed draft vocabulary indexes the
    same rows. Drawn on the CPU: the same numbers on every device.
    """
    rows = []
    for position in positions:
        generator = torch.Generator().manual_seed(counter_key(seed, position, SHARED_NOISE) >> 1)
        rows.append(torch.rand(vocabulary_size, generator=generator, dtype=torch.float32))
    uniform_RV = torch.stack(rows).clamp_(1e-20, 1.0 - 6e-8)
    return -(-uniform_RV.log()).log()


LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI's API uses this number."""


def raw_logprobs(logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the first len(token_ids) rows before temperature, filters, penalties and masks."""
    log_probs_RV = torch.log_softmax(logits_RV[: len(token_ids)].float(), dim=-1).clamp_(min=LOWEST_LOGPROB)
    chosen = log_probs_RV.gather(-1, torch.tensor(token_ids, device=logits_RV.device)[:, None])[:, 0].tolist()
    top = log_probs_RV.topk(min(num_top, log_probs_RV.shape[-1]), dim=-1)
    rows = zip(token_ids, chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]
