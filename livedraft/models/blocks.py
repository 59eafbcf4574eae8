"""Weights as a GGUF file stores them: blocks of 32 neighbouring inputs of an output, with a scale and perhaps an offset. The
compiled step can run them as they are, in a third of the bytes of bf16 and without rounding.

Legend: O outputs, I inputs, B blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

NUM_INPUTS = 32


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """value = scale * level + offset."""

    num_bits: int
    """4: levels are 0 to 15; 8: -128 to 127, and offsets are 0."""
    levels_OI: torch.Tensor  # int8
    scales_OB: torch.Tensor  # float16
    offsets_OB: torch.Tensor  # float16

    @property
    def shape(self) -> tuple[int, int]:
        return self.levels_OI.shape[0], self.levels_OI.shape[1]

    def of_rows(self, rows_O: torch.Tensor) -> Blocks:
        return replace(
            self, levels_OI=self.levels_OI[rows_O], scales_OB=self.scales_OB[rows_O], offsets_OB=self.offsets_OB[rows_O]
        )

    def values(self) -> torch.Tensor:
        """[O, I] in float32."""
        values_OBJ = self.levels_OI.float().unflatten(1, (-1, NUM_INPUTS))
        values_OBJ *= self.scales_OB.float()[..., None]
        return (values_OBJ if self.num_bits == 8 else values_OBJ.add_(self.offsets_OB.float()[..., None])).flatten(1)


def joined(parts: Sequence[Blocks]) -> Blocks:
    """One matrix's outputs after another's."""
    return replace(
        parts[0],
        levels_OI=torch.cat([part.levels_OI for part in parts]),
        scales_OB=torch.cat([part.scales_OB for part in parts]),
        offsets_OB=torch.cat([part.offsets_OB for part in parts]),
    )


def blocks_of(entry: Any) -> Blocks | None:
    """Of a GGUF file's tensor; None where it is stored in another way."""
    kind = entry.tensor_type.name
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        return None
    num_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    data_OBY = np.ascontiguousarray(entry.data).reshape(entry.data.shape[0], -1, num_bytes)
    numbers_OBH = data_OBY[..., :4].copy().view(np.float16)  # a scale, and with Q4_1 an offset
    scales_OB = torch.from_numpy(numbers_OBH[..., 0].copy())
    if kind == "Q8_0":
        levels_OBJ, offsets_OB = data_OBY[..., 2:].view(np.int8), torch.zeros_like(scales_OB)
    else:
        pairs_OBJ = data_OBY[..., num_bytes - NUM_INPUTS // 2 :]  # the first half of the inputs, then the second
        levels_OBJ = np.concatenate([pairs_OBJ & 15, pairs_OBJ >> 4], axis=-1).view(np.int8)
        is_offset_stored = kind == "Q4_1"
        offsets_OB = torch.from_numpy(numbers_OBH[..., 1].copy()) if is_offset_stored else -8 * scales_OB
    return Blocks(
        num_bits=8 if kind == "Q8_0" else 4,
        levels_OI=torch.from_numpy(np.ascontiguousarray(levels_OBJ).reshape(data_OBY.shape[0], -1)),
        scales_OB=scales_OB,
        offsets_OB=offsets_OB,
    )
