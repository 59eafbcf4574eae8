"""Micro-batches side by side: each lane is a thread with its share of the cores.

Two lanes of one thread do half as much again as one of two: between the products of a small model lie many operations that
are too short to be shared out, and one lane computes while another is at those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_lanes(num_lanes: int, lane: Callable[[int], T]) -> list[T]:
    """`lane(number)` in a thread of its own each, all at once; a single one in the caller's. What is not a lane's own must not
    change meanwhile. Raises what a lane raises, when all have ended."""
    if num_lanes == 1:
        return [lane(0)]
    num_threads = torch.get_num_threads()
    pool = _pool(num_lanes, max(1, num_threads // num_lanes))
    futures = [pool.submit(lane, number) for number in range(num_lanes)]
    errors = [future.exception() for future in futures]
    torch.set_num_threads(num_threads)  # a thread's count is its own, but the last one set is that of threads to come
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


@functools.lru_cache(maxsize=4)
def _pool(num_lanes: int, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        num_lanes, thread_name_prefix="training-lane", initializer=torch.set_num_threads, initargs=(num_threads,)
    )
