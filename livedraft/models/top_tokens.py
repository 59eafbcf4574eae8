"""The most likely tokens of rows of logits and the rows' log normalisers: compiled where it can be, torch elsewhere.

Legend: R rows of a request's block, C of them wanted; V vocabulary, K tokens kept.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass

import torch

from livedraft.models.native import kernels


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    token_ids_CK: torch.Tensor  # int32; most likely first
    log_probs_CK: torch.Tensor  # float16
    tail_mass_C: torch.Tensor
    """Of all other tokens."""
    normalisers_R: torch.Tensor
    """Of all rows of all blocks, in order: log-probabilities are logits minus them."""


def best_tokens(blocks: Sequence[torch.Tensor]) -> tuple[list[float], list[int]]:
    """The largest logit of each row of all blocks ([R, V]), in order, and the first token that has it. The logit is a NaN where
    the row has one, whatever the token."""
    library = _kernels_for(blocks[0])
    if library is None:
        return best_tokens_by_torch(blocks)
    rows = _pointers(blocks)
    values_R, token_ids_R = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int32)
    library.livedraft_best(
        len(rows), rows, blocks[0].shape[1], values_R.data_ptr(), token_ids_R.data_ptr(), torch.get_num_threads()
    )
    return values_R.tolist(), token_ids_R.tolist()


def best_tokens_by_torch(blocks: Sequence[torch.Tensor]) -> tuple[list[float], list[int]]:
    """The slow twin, and the one for a GPU."""
    best = together(list(blocks)).max(-1)
    # Together: on a GPU this is where the host waits, once a round.
    values, token_ids = torch.stack([best.values.double(), best.indices.double()]).tolist()
    return values, [int(token) for token in token_ids]


def probabilities_of(rows_RV: torch.Tensor, token_ids_R: Sequence[int]) -> list[float]:
    """Of one token of each row, by softmax of the logits as they are: a draft asks after every token it draws, so the
    kernel is called for the normalisers alone (13 µs of a row of 8,192; by way of `top_tokens` 27)."""
    library = _kernels_for(rows_RV)
    if library is None:
        return probabilities_by_torch(rows_RV, token_ids_R)
    R, V = rows_RV.shape
    normalisers_R = torch.empty(R)
    library.livedraft_top(
        R, _pointers([rows_RV]), (c_int * R)(*[-1] * R), V, 1, None, None, None, normalisers_R.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    drawn = zip(token_ids_R, normalisers_R.tolist(), strict=True)
    return [math.exp(float(rows_RV[row, token]) - normaliser) for row, (token, normaliser) in enumerate(drawn)]


def probabilities_by_torch(rows_RV: torch.Tensor, token_ids_R: Sequence[int]) -> list[float]:
    """The slow twin, and the one for a GPU, where the host waits once."""
    drawn_R1 = torch.tensor(token_ids_R, device=rows_RV.device)[:, None]
    probabilities: list[float] = (rows_RV.gather(-1, drawn_R1)[:, 0] - torch.logsumexp(rows_RV, -1)).exp().tolist()
    return probabilities


def top_tokens(blocks: Sequence[torch.Tensor], num_wanted: Sequence[int], num_top: int) -> TopTokens:
    """The top tokens, which cost most, of the first `num_wanted` rows of each block alone; normalisers of all."""
    library = _kernels_for(blocks[0])
    if library is None:
        return top_tokens_by_torch(blocks, num_wanted, num_top)
    num_top = min(num_top, blocks[0].shape[1])
    rows = _pointers(blocks)
    places, num_places = [], 0
    for block_RV, wanted in zip(blocks, num_wanted, strict=True):
        R = block_RV.shape[0]
        places += [*range(num_places, num_places + wanted), *[-1] * (R - wanted)]
        num_places += wanted
    log_probs_CK = torch.empty(num_places, num_top, dtype=torch.float16)
    token_ids_CK = torch.empty(num_places, num_top, dtype=torch.int32)
    tail_mass_C, normalisers_R = torch.empty(num_places), torch.empty(len(rows))
    library.livedraft_top(
        len(rows), rows, (c_int * len(rows))(*places), blocks[0].shape[1], num_top, log_probs_CK.data_ptr(),
        token_ids_CK.data_ptr(), tail_mass_C.data_ptr(), normalisers_R.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return TopTokens(
        token_ids_CK=token_ids_CK, log_probs_CK=log_probs_CK, tail_mass_C=tail_mass_C, normalisers_R=normalisers_R
    )


def top_tokens_by_torch(blocks: Sequence[torch.Tensor], num_wanted: Sequence[int], num_top: int) -> TopTokens:
    """The slow twin, and the one for a GPU."""
    wanted_CV = together([block_RV[:wanted] for block_RV, wanted in zip(blocks, num_wanted, strict=True)])
    top = wanted_CV.topk(min(num_top, wanted_CV.shape[-1]), dim=-1)
    normalisers = [torch.logsumexp(block_RV, dim=-1) for block_RV in blocks]
    normalisers_C = together([block_R[:wanted] for block_R, wanted in zip(normalisers, num_wanted, strict=True)])
    log_probs_CK = top.values - normalisers_C[:, None]
    return TopTokens(
        token_ids_CK=top.indices.int(),
        log_probs_CK=log_probs_CK.half(),
        tail_mass_C=(1.0 - log_probs_CK.exp().sum(-1)).clamp(min=0.0),
        normalisers_R=together(normalisers),
    )


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """One request's rows, the usual case on a small machine, are not copied: they are megabytes."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _kernels_for(block_RV: torch.Tensor) -> ctypes.CDLL | None:
    return kernels() if block_RV.device.type == "cpu" and block_RV.dtype == torch.float32 else None


def _pointers(blocks: Sequence[torch.Tensor]) -> ctypes.Array[c_void_p]:
    """Of every row."""
    V, found = blocks[0].shape[1], []
    for block_RV in blocks:
        assert block_RV.shape[1] == V and block_RV.stride(1) == 1
        start, stride = block_RV.data_ptr(), 4 * block_RV.stride(0)
        found += [start + row * stride for row in range(block_RV.shape[0])]
    return (c_void_p * len(found))(*found)
