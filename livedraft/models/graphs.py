"""Work of fixed shapes, recorded once and replayed: CUDA graphs over a ladder of shapes.

On a GPU a pass of a small model is a thousand launches that cost more than what they launch; a graph is one. What is recorded
reads and writes tensors at fixed addresses, so a pass is padded to a shape of the ladder, its inputs are copied in, and the
graph is replayed. How work is recorded is passed in: without a GPU `EagerReplay` runs the same padded work again, which is
how everything but the recording itself is tested.

What is captured must not read anything back, allocate pinned memory, draw from a generator, or take a shape from data.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

Shape = tuple[int, ...]
Replay = Callable[[], None]

logger = logging.getLogger("livedraft")
_WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and allocate workspaces in the first ones."""


class Capture(Protocol):
    def capture(self, work: Callable[[], None]) -> Replay:
        """What runs `work` again. Its inputs and outputs are tensors that stay where they are."""


class EagerReplay:
    """Runs the work itself: where there is no GPU."""

    def capture(self, work: Callable[[], None]) -> Replay:
        return work


class CudaGraphs:
    """One pool of memory for all graphs: they are replayed one after another on one stream, and what outlives a replay is in
    buffers outside the pool."""

    _one_at_a_time = threading.Lock()  # CUDA allows one capture in a process

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """Kept, for a pool dies with its last graph."""

    def capture(self, work: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream()
        with self._one_at_a_time:
            try:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    for _ in range(_WARM_UPS):
                        work()
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                # thread_local: the swap watcher's thread may allocate while the engine's captures, or the other way round.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind
        self._first = self._first or graph
        return graph.replay


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """For filling weights while requests run: their rounds are not held up, and all is there at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.lru_cache(maxsize=4)
def capture_on(device: torch.device) -> Capture:
    """The same for all models on a device, so that their graphs share a pool."""
    return CudaGraphs(device) if device.type == "cuda" else EagerReplay()


class GraphLadder:
    """One piece of work in several shapes; a wanted one is served by the smallest recorded shape that covers it.

    Recorded at construction, for at most about `seconds`: first the shapes that no other covers (also so that the pool gets its
    full size), then from the smallest up. A shape that cannot be recorded runs eagerly, and says so once.
    """

    def __init__(
        self, shapes: Iterable[Shape], work: Callable[..., None], capture: Capture, *, seconds: float = math.inf
    ) -> None:
        """`work(*shape)` reads and writes static buffers only."""
        self.failure: str | None = None
        self._replays: dict[Shape, Replay] = {}
        self._found: dict[Shape, Shape | None] = {}
        deadline = time.monotonic() + seconds
        by_size = sorted(set(shapes), key=lambda shape: (math.prod(shape), shape))
        largest = [one for one in by_size if not any(_covers(other, one) for other in by_size if other != one)]
        for shape in [*reversed(largest), *(one for one in by_size if one not in largest)]:
            if time.monotonic() > deadline and shape not in largest:
                break
            self._replays[shape] = self._recorded(functools.partial(work, *shape), capture)

    def _recorded(self, work: Callable[[], None], capture: Capture) -> Replay:
        try:
            return capture.capture(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.failure is None:
                self.failure = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                logger.warning("A CUDA graph could not be captured and runs eagerly: %s", self.failure)
            return work

    @property
    def num_recorded(self) -> int:
        return len(self._replays)

    def covering(self, wanted: Shape) -> tuple[Shape, Replay] | None:
        """The shape to pad to, and what runs it; None where the ladder ends before."""
        if wanted not in self._found:
            fitting = [shape for shape in self._replays if _covers(shape, wanted)]
            self._found[wanted] = min(fitting, key=math.prod) if fitting else None
        shape = self._found[wanted]
        return None if shape is None else (shape, self._replays[shape])


def _covers(shape: Shape, wanted: Shape) -> bool:
    return all(size >= needed for size, needed in zip(shape, wanted, strict=True))


def steps_up_to(limit: int, first: int = 1, factor: int = 2) -> list[int]:
    """first, first * factor, ... and the limit itself."""
    steps = []
    while first < limit:
        steps.append(first)
        first *= factor
    return [*steps, limit]


class StaticInput:
    """Numbers at a fixed address of the device, filled from the host in one copy that the host does not wait for."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.on_device = torch.zeros(size, dtype=dtype, device=device)
        is_cuda = device.type == "cuda"
        self._on_host = torch.zeros(size, dtype=dtype, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None

    def fill(self, values: Sequence[float]) -> None:
        """The first len(values) numbers."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy out of the host's buffer; done long ago, as a rule
        size = len(values)
        self._on_host[:size] = torch.tensor(values, dtype=self._on_host.dtype)
        self.on_device[:size].copy_(self._on_host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class HostCopy:
    """A small result on its way to the host; asking for it waits for that copy alone."""

    def __init__(self, source: torch.Tensor) -> None:
        self._copy = source.to("cpu", non_blocking=True) if source.is_cuda else source.clone()
        self._copied = None
        if source.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @functools.cached_property
    def values(self) -> list[list[int]]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()  # type: ignore[no-any-return]  # of int64
