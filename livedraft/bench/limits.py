"""`livedraft bench limits`: what this machine can do at best, and what each path makes of it.

A pass of a small batch reads every weight once, so memory bandwidth bounds it; a large one is bounded by arithmetic. Printed:
both rates as measured here, the time of a pass over 1 to 64 rows on every path (V), a draft step (c), what a round costs
beside its passes (Python), and the share of the limit that each reaches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from livedraft.bench.machine import hardware
from livedraft.config import EngineConfig
from livedraft.device import ExecutionPath, choose_execution_path, num_available_cores, use_threads, versions
from livedraft.engine.runner import Runner
from livedraft.llm import LLM
from livedraft.models.native import unavailable_reason, with_kernels
from livedraft.models.open import open_model
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams

_READ_BYTES = 1 << 29
_PRODUCT = (512, 2048, 2048)
_ROWS = (1, 2, 4, 6, 8, 16, 32, 64)
_DECODED = 64


def run(*, model: str, dtype: str, threads: int | None, as_json: bool) -> None:
    use_threads(threads or num_available_cores())
    base = choose_execution_path(dtype, "auto")
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "read_gb_per_second": round(_read_rate() / 1e9, 1),
        "product_gflops_per_second": round(_product_rate(base.dtype) / 1e9),
        "compiled_step": unavailable_reason() or "yes",
        "paths": {name: _path(model, path) for name, path in _paths(base, dtype, model).items()},
    }
    result |= _engine(model, dtype, threads)
    fastest = result["paths"][next(name for name in ("compiled", "onednn", "torch") if name in result["paths"])]
    for path in result["paths"].values():
        path["share_of_read_limit"] = round(
            path["bytes"] / 1e9 / result["read_gb_per_second"] / path["ms"]["1"] * 1000, 2
        )
    result |= {"versions": versions(), "hardware": hardware()}
    result["python_ms_a_round"] = round(result["plain_round_ms"] - fastest["ms"]["1"], 2)
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)


def _paths(base: ExecutionPath, dtype: str, model: str) -> dict[str, ExecutionPath]:
    paths = {"torch": replace(base, is_prepacked=False)}
    if base.is_prepacked:
        paths["onednn"] = base
    compiled = with_kernels(base, dtype)
    if compiled.is_compiled:
        paths |= {"compiled": compiled, "compiled int8": replace(compiled, is_int8=True)}
        if resolve_model(model).suffix == ".gguf":
            paths["compiled int4"] = replace(compiled, is_int4=True)
    return paths


def _seconds(work: Callable[[], object], num_repeats: int) -> float:
    work()
    seconds = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _read_rate() -> float:
    """Bytes a second of reading memory that no cache holds."""
    values = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / _seconds(values.sum, 7)


def _product_rate(dtype: torch.dtype) -> float:
    """Operations a second of a matrix product whose operands the caches hold."""
    m, k, n = _PRODUCT
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    with torch.inference_mode():
        return 2 * m * k * n / _seconds(lambda: torch.nn.functional.linear(a, b), 9)


def _path(model: str, path: ExecutionPath) -> dict[str, Any]:
    opened = open_model(resolve_model(model), path)
    costs = Runner(opened.runtime(num_slots=1, max_length=256)).measure_costs(None, num_repeats=9)
    return {
        "ms": {str(rows): round(1000 * costs.target_seconds(rows), 2) for rows in _ROWS},
        "V": {str(rows): round(costs.verify_cost(rows), 2) for rows in _ROWS},
        "bytes": opened.num_weight_bytes,
    }


def _engine(model: str, dtype: str, threads: int | None) -> dict[str, Any]:
    """A round of plain decoding as served, and the costs the engine measured for itself."""
    config = EngineConfig(max_num_seqs=1, max_model_len=512, num_prefix_slots=0)
    with LLM(model, draft="untrained", dtype=dtype, num_threads=threads, engine=config) as llm:
        costs = llm.engine.costs
        llm.engine.offer_draft(None)
        llm.engine.drafting.uses_suffixes = False
        sampling = SamplingParams(max_tokens=_DECODED, ignore_eos=True)
        prompt = llm.tokenizer.encode("The weather today is")
        seconds = _seconds(lambda: llm.generate([prompt], sampling), 3)
        return {"plain_round_ms": round(1000 * seconds / _DECODED, 2), "c": round(costs.draft_cost, 4)}


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "path", *map(str, _ROWS), "of limit", title="ms a pass of the target, by rows; share of what memory allows"
    )
    for name, path in result["paths"].items():
        table.add_row(name, *(str(path["ms"][str(rows)]) for rows in _ROWS), f"{path['share_of_read_limit']:.0%}")
    console.print(table)
    for name in ("threads", "read_gb_per_second", "product_gflops_per_second", "compiled_step", "plain_round_ms",
                 "python_ms_a_round", "c"):  # fmt: skip
        console.print(f"{name:>26}  {result[name]}")
