"""`livedraft bench growth`: time a token against context length and against the number of requests.

What a pass must read is the weights, once, and each request's keys and values; its arithmetic grows with the rows. Printed are
a fitted exponent and the worst case: by context, time may grow as what must be read does; by batch, as the number of requests.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from livedraft.bench.machine import hardware
from livedraft.bench.outputs import check_outputs
from livedraft.device import choose_execution_path, num_available_cores, use_threads, versions
from livedraft.models.native import quantized, with_kernels
from livedraft.models.open import open_model
from livedraft.models.pull import resolve_model
from livedraft.models.step import ModelStep

_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32)
_BATCH_CONTEXTS = (128, 2048)
_CHUNK = 256
_REPEATS = 9
SLACK = 1.1
"""Times of a shared machine differ by so much without any cause."""


def run(*, model: str, dtype: str, quantization: str, threads: int | None, plot: Path | None, as_json: bool) -> None:
    check_outputs(plot=plot)
    use_threads(threads or num_available_cores())
    path = quantized(with_kernels(choose_execution_path(dtype, "auto"), dtype), quantization)
    opened = open_model(resolve_model(model), path)
    longest = min(max(_CONTEXTS), opened.max_positions)
    contexts = [context for context in _CONTEXTS if context <= longest] or [longest]
    runtime = opened.runtime(num_slots=max(_BATCHES), max_length=longest)
    weight_bytes = opened.num_weight_bytes
    position_bytes = opened.kv_bytes_per_position(0)
    by_context, writing_seconds = _by_context(runtime, contexts)
    ms = {"by_context": by_context}
    read = {"by_context": {str(context): weight_bytes + context * position_bytes for context in contexts}}
    for context in (one for one in _BATCH_CONTEXTS if one <= longest):
        name = f"by_batch_at_{context}"
        ms[name] = _by_batch(runtime, context)
        read[name] = {str(batch): batch for batch in _BATCHES}  # rows: past a few, arithmetic decides and not memory
    result = {
        "execution": opened.path.description,
        "ms_a_pass": {name: {size: round(value, 2) for size, value in figures.items()} for name, figures in ms.items()},
        "growth": {name: judged(ms[name], read[name]) for name in ms},
        "prompt_tokens_per_second": round(contexts[-1] / writing_seconds),
        "weight_bytes": weight_bytes,
        "kv_bytes_per_position": position_bytes,
        "versions": versions(),
        "hardware": hardware(),
    }
    if plot is not None:
        from livedraft.bench.plots import plot_cost_growth

        plot_cost_growth(result["ms_a_pass"], plot)
    print(json.dumps(result)) if as_json else _print(result)


def judged(ms: Mapping[str, float], read: Mapping[str, float]) -> dict[str, Any]:
    """The exponent of the time over what must be read, by least squares of their logarithms; and the largest ratio of how both
    grew since the first size."""
    sizes = list(ms)
    exponent = (
        float(np.polyfit(*([math.log(of[size]) for size in sizes] for of in (read, ms)), 1)[0])
        if len(sizes) > 1
        else 1.0
    )
    first = sizes[0]
    worst = max((ms[size] / ms[first]) / (read[size] / read[first]) for size in sizes)
    return {"exponent": round(exponent, 2), "worst_over_linear": round(worst, 2), "is_linear_at_most": worst <= SLACK}


def _by_context(runtime: ModelStep, contexts: list[int]) -> tuple[dict[str, float], float]:
    """(ms a pass over one token, seconds to write the longest context in chunks)."""
    figures, written, seconds = {}, 0, 0.0
    for context in contexts:
        started = time.perf_counter()
        _write(runtime, written, context - 1)
        seconds += time.perf_counter() - started
        written = context - 1
        figures[str(context)] = _ms(lambda at=written: runtime.forward([5], [at], [0], [0]))  # type: ignore[misc]  # a default binds it
    return figures, seconds


def _by_batch(runtime: ModelStep, context: int) -> dict[str, float]:
    _write(runtime, 0, context)
    for slot in range(1, max(_BATCHES)):
        runtime.copy_slot(0, slot, context)
    figures = {}
    for batch in _BATCHES:
        slots = list(range(batch))
        figures[str(batch)] = _ms(lambda s=slots: runtime.forward([5] * len(s), [context - 1] * len(s), s, s))  # type: ignore[misc]  # a default binds it
    return figures


@torch.inference_mode()
def _write(runtime: ModelStep, start: int, end: int) -> None:
    while start < end:
        rows = list(range(start, min(start + _CHUNK, end)))
        runtime.forward([5] * len(rows), rows, [0] * len(rows), [])
        start += len(rows)


@torch.inference_mode()
def _ms(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1000 * median(seconds)


def _print(result: dict[str, Any]) -> None:
    for name, figures in result["ms_a_pass"].items():
        print(f"ms a pass {name.replace('_', ' ')}: " + ", ".join(f"{size}: {ms}" for size, ms in figures.items()))
        growth = result["growth"][name]
        verdict = "no worse than linear" if growth["is_linear_at_most"] else "WORSE THAN LINEAR"
        print(f"{'':4}exponent {growth['exponent']}, at most {growth['worst_over_linear']} × a line: {verdict}")
    print(
        f"{result['execution']}; a prompt as long as the longest context {result['prompt_tokens_per_second']} tokens/s; "
        f"{result['hardware']}"
    )
