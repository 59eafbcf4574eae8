"""Keys and values of running requests: one contiguous slot a request, written by position, rewound by forgetting.

Legend: S slots, G key-value heads, T cache positions, E head width, N rows, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT = 64
MAX_ROWS_ATTENDED_TOGETHER = 32
"""Segments up to this many rows are padded into one attention call; longer ones (prefill chunks) run alone."""


class KVCache:
    """Allocated once. A position beyond a request's length holds garbage that the mask hides and the next write replaces;
    that is why rewinding costs nothing: the caller only shortens the length it keeps."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_length: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # zeros, not empty: a masked NaN would still poison 0 * NaN.
        shape = (num_layers, 2, num_slots, num_kv_heads, max_length, head_width)
        is_lazy = device.type == "cpu"
        self._storage = _lazy_zeros(shape, dtype) if is_lazy else torch.zeros(shape, dtype=dtype, device=device)
        self.keys = self._storage[:, 0].unbind(0)
        self.values = self._storage[:, 1].unbind(0)

    def views(self, slots: slice, positions: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) [slots, G, positions, E] of every layer: views, all made in two calls, because slicing in every
        layer of every pass costs more than the attention itself."""
        return list(zip(*(part.unbind(0) for part in self._storage[:, :, slots, :, positions].unbind(1)), strict=True))

    def clear(self, slot: int) -> None:
        self._storage[:, :, slot] = 0

    def copy(self, source: int, destination: int, num_positions: int) -> None:
        positions = slice(0, num_positions)
        self._storage[:, :, destination, :, positions] = self._storage[:, :, source, :, positions]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory that is used only as positions are written: numpy takes pages the system hands out as zeros when they are first
    touched, where torch.zeros writes them all, seconds and a gigabyte for 20 slots of a small model."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT  # a vector that lies across two cache lines costs two reads
    return raw[start : start + num_bytes].view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive rows of one forward pass that belong to one slot and have consecutive positions."""

    slot: int
    first_row: int
    num_rows: int
    first_position: int

    @property
    def length(self) -> int:
        """Cache length after this pass."""
        return self.first_position + self.num_rows


def split_into_segments(positions_N: list[int], slots_N: list[int]) -> list[Segment]:
    """Group ragged rows by slot. Raises AssertionError when a slot's rows are scattered or its positions have gaps."""
    segments: list[Segment] = []
    start = 0
    for row in range(1, len(slots_N) + 1):
        if row == len(slots_N) or slots_N[row] != slots_N[start]:
            segments.append(
                Segment(slot=slots_N[start], first_row=start, num_rows=row - start, first_position=positions_N[start])
            )
            assert positions_N[row - 1] - positions_N[start] == row - 1 - start, (
                "positions of a slot must be consecutive"
            )
            start = row
    assert len({segment.slot for segment in segments}) == len(segments), "rows of one slot must be adjacent"
    return segments
