"""The processes that train one draft together: data parallel under torchrun. Alone, every sum is what it was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """`rank` of `size` processes. All of them take the same steps; each computes the gradient of its share of a batch."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def from_environment(cls) -> Ranks:
        """Join the others when torchrun started this process."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if not dist.is_initialized():
            # The others wait while the first one generates all responses, however long that takes.
            dist.init_process_group("gloo", timeout=timedelta(days=30))
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """The one that prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of a batch."""
        return list(items[self.rank :: self.size])

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over all processes."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(number) for number in sums]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor, in place, becomes the sum over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()
