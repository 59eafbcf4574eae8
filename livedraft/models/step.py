"""The model step: the one call every runtime answers, for prefill chunks, verification and draft catch-up alike.

Legend: N rows of the pass, R rows whose logits are asked for, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    logits_RV: torch.Tensor  # float32
    hidden_RD: torch.Tensor | None = None  # after the final norm; None where a runtime does not give them


class ModelStep(Protocol):
    """A model with a cache of `num_slots` slots of `max_length` positions."""

    num_slots: int
    max_length: int
    vocabulary_size: int
    device: torch.device

    def forward(
        self, token_ids_N: list[int], positions_N: list[int], slots_N: list[int], logit_rows_R: list[int]
    ) -> StepOutput:
        """Write N tokens into their slots at their positions; return logits at the rows asked for.

        Rows of one slot are adjacent and their positions consecutive. A position at or before one already written
        rewinds the slot to it: what stood there and after is forgotten.
        """

    def clear_slot(self, slot: int) -> None:
        """Forget the slot with all its numbers: what is not finite would spoil whoever is batched beside it."""

    def copy_slot(self, source: int, destination: int, num_positions: int) -> None:
        """Make the destination's first positions those of the source; whatever the destination held is forgotten."""
