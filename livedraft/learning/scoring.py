"""What a draft is worth on served requests: its acceptance, teacher-forced over all their output positions.

Legend: B sequences, T tokens, N positions, K teacher tokens, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from livedraft.learning.batches import Example, TrainBatch
from livedraft.learning.forward import Forward
from livedraft.learning.losses import compare
from livedraft.sampling import logits_to_probs

ROWS_PER_CHUNK = 512
"""Rows of draft logits in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One request's acceptance, teacher-forced over all its output positions."""

    alpha: float
    """Mean of Σ min(target_probs, draft_probs) at temperature 1; a lower bound under top-K teachers."""
    alpha_t0: float
    """Share of positions where both models' most likely token is the same."""
    alpha_served: float
    """As alpha, under the request's own temperature and filters. Penalties, bias and grammars are left out: candidate and
    parent are compared on the same positions without them."""
    num_positions: int
    served_overlap_T: np.ndarray
    """What alpha_served is the mean of: the chance that a token drafted at the position is accepted."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A draft ready to be run: its weights, and the row of each target token or −1."""

    weights: Forward
    lookup_V: torch.Tensor


class Collate(Protocol):
    def __call__(self, examples: Sequence[Example], lookup_V: torch.Tensor, *, every_position: bool) -> TrainBatch: ...


def score_batches(
    scorer: Scorer, batches: Sequence[list[Example]], collated: Collate, between: Callable[[], None]
) -> dict[int, Score]:
    """By the examples' ids in memory; `between` is called after each batch."""
    scores: dict[int, Score] = {}
    for examples in batches:
        batch = collated(examples, scorer.lookup_V, every_position=True)
        hidden_ND = scorer.weights.hidden(batch.token_ids_BT)[batch.loss_rows_N]
        for index, example in enumerate(examples):
            rows = torch.nonzero(batch.example_N == index)[:, 0]
            parts = [
                _score_rows(example, batch, some, scorer.weights.head(hidden_ND[some]).float())
                for some in rows.split(ROWS_PER_CHUNK)
            ]
            overlap_T, matches_T, served_T = (torch.cat(columns) for columns in zip(*parts, strict=True))
            scores[id(example)] = Score(
                alpha=overlap_T.mean().item(),
                alpha_t0=matches_T.mean().item(),
                alpha_served=served_T.mean().item(),
                num_positions=len(rows),
                served_overlap_T=served_T.numpy(),
            )
        between()
    return scores


def _score_rows(
    example: Example, batch: TrainBatch, rows: torch.Tensor, logits_TW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Σ min, whether the most likely tokens match, Σ min as served) at some of an example's positions.

    rows: their places in the batch; logits_TW: the draft's logits there.
    """
    teacher_rows_TK, teacher_log_probs_TK = batch.teacher_rows_NK[rows], batch.teacher_log_probs_NK[rows]
    overlap_T = compare(logits_TW, teacher_rows_TK, teacher_log_probs_TK).overlap_N
    best_T1 = teacher_log_probs_TK.argmax(-1, keepdim=True)
    matches_T = teacher_rows_TK.gather(1, best_T1)[:, 0] == logits_TW.argmax(-1)
    if example.sampling.is_greedy:
        served_T = matches_T.float()
    else:
        # The teacher's raw log-probabilities are logits up to a constant; mass outside the top K is left out.
        target_probs_TK = logits_to_probs(teacher_log_probs_TK, example.sampling)
        draft_probs_TW = logits_to_probs(logits_TW, example.sampling)
        draft_probs_TK = draft_probs_TW.gather(-1, teacher_rows_TK.clamp(min=0)) * (teacher_rows_TK >= 0)
        served_T = torch.minimum(target_probs_TK, draft_probs_TK).sum(-1)
    return overlap_T, matches_T.float(), served_T
