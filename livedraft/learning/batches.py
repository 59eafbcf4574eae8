"""Traces to training batches.

The alignment that everything rests on: the label of output position i is the target's distribution AT i, and the draft
predicts it from the token before i. In the sequence prompt + output that is row len(prompt) − 1 + i, whose input is the
last prompt token for i = 0. (OSD's published code is off by one here.)

Legend: B sequences, T tokens, N loss positions, K teacher tokens, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from livedraft.records import DEFAULT_ROUTE, SamplingParams, Trace


def sha256_of_texts(token_ids: Iterable[Sequence[int]]) -> str:
    """What identifies training data: the texts in this order, as they are read by the models."""
    digest = hashlib.sha256()
    for one in token_ids:
        digest.update(np.array([len(one), *one], dtype=np.int64).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Example:
    """One trace as the trainer keeps it."""

    trace_id: int
    token_ids: np.ndarray  # int64, prompt + output without the last token, which predicts nothing
    num_prompt_tokens: int
    output_token_ids: np.ndarray
    teacher_token_ids_TK: np.ndarray
    teacher_log_probs_TK: np.ndarray
    loss_mask_T: np.ndarray  # bool, which output positions teach
    sampling: SamplingParams
    client_key: str = ""
    stream: str = DEFAULT_ROUTE
    """The route that the router gave the request."""

    @property
    def teaches(self) -> bool:
        return bool(self.loss_mask_T.any())

    @property
    def prompt_key(self) -> int:
        """The same for every copy of a prompt."""
        return zlib.crc32(self.token_ids[: self.num_prompt_tokens].tobytes())  # not hash(): the same after a restart

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_positions(self) -> int:
        return len(self.loss_mask_T)


def example_from_trace(trace: Trace, trace_id: int, positions: Literal["all", "rejected"] = "all") -> Example:
    token_ids = np.array([*trace.prompt_token_ids, *trace.output_token_ids[:-1]], dtype=np.int64)
    num_positions = len(trace.output_token_ids)
    mask = np.ones(num_positions, dtype=bool)
    if positions == "rejected":
        # Where a proposal was rejected and the target's own token stands (OSD, Algorithm 1).
        is_rejected_P = ~trace.drafted_accepted_P & ~trace.drafted_off_path_P
        mask[:] = False
        mask[trace.drafted_position_P[is_rejected_P]] = True
    return Example(
        trace_id=trace_id,
        token_ids=token_ids,
        num_prompt_tokens=len(trace.prompt_token_ids),
        output_token_ids=np.array(trace.output_token_ids, dtype=np.int64),
        teacher_token_ids_TK=trace.teacher_token_ids_TK,
        teacher_log_probs_TK=trace.teacher_log_probs_TK,
        loss_mask_T=mask,
        sampling=trace.sampling,
        client_key=trace.client_key,
        stream=trace.route,
    )


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Sequences padded on the right; loss positions as rows of the flattened [B * T] hidden states."""

    token_ids_BT: torch.Tensor
    loss_rows_N: torch.Tensor
    teacher_rows_NK: torch.Tensor  # row of the draft vocabulary, −1 where it has none
    teacher_token_ids_NK: torch.Tensor
    teacher_log_probs_NK: torch.Tensor  # float32
    label_rows_N: torch.Tensor  # row of the token served, −1 where the draft has none
    example_N: torch.Tensor  # which of the batch's examples a position belongs to
    trace_ids_B: torch.Tensor
    num_tokens: int
    """Without padding."""


def collate(
    examples: Sequence[Example], target_to_draft_V: torch.Tensor, *, every_position: bool = False
) -> TrainBatch:
    """`every_position` ignores the loss masks, for scoring. `target_to_draft_V` holds −1 for tokens a draft lacks."""
    T = max(example.num_tokens for example in examples)
    token_ids_BT = torch.zeros(len(examples), T, dtype=torch.long)
    loss_rows, teacher_ids, teacher_log_probs, labels, owners = [], [], [], [], []
    for index, example in enumerate(examples):
        token_ids_BT[index, : example.num_tokens] = torch.from_numpy(example.token_ids)
        kept = np.arange(example.num_positions) if every_position else np.flatnonzero(example.loss_mask_T)
        loss_rows.append(index * T + example.num_prompt_tokens - 1 + kept)
        teacher_ids.append(example.teacher_token_ids_TK[kept])
        teacher_log_probs.append(example.teacher_log_probs_TK[kept])
        labels.append(example.output_token_ids[kept])
        owners.append(np.full(len(kept), index))
    token_ids_NK = torch.from_numpy(np.concatenate(teacher_ids)).long()
    return TrainBatch(
        token_ids_BT=token_ids_BT,
        loss_rows_N=torch.from_numpy(np.concatenate(loss_rows)),
        teacher_rows_NK=target_to_draft_V[token_ids_NK],
        teacher_token_ids_NK=token_ids_NK,
        teacher_log_probs_NK=torch.from_numpy(np.concatenate(teacher_log_probs)).float(),
        label_rows_N=target_to_draft_V[torch.from_numpy(np.concatenate(labels))],
        example_N=torch.from_numpy(np.concatenate(owners)),
        trace_ids_B=torch.tensor([example.trace_id for example in examples]),
        num_tokens=sum(example.num_tokens for example in examples),
    )


def micro_batches(examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Split by padded size, similar lengths together; one long example may exceed the limit alone."""
    batches: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: example.num_tokens):
        if batches and example.num_tokens * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(example)
        else:
            batches.append([example])
    return batches
