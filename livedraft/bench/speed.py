"""`livedraft bench speed`: plain, speculative and transformers' generate, batch 1, greedy, one interleaved run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from livedraft.bench.alternate import Timing, alternate, median_with_lower_bound
from livedraft.bench.contender import Contender
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts
from livedraft.bench.reference import transformers_model
from livedraft.bench.same_output import compare_outputs
from livedraft.draft_source import is_whole_model
from livedraft.llm import LLM
from livedraft.models.native import fitted
from livedraft.models.open import open_model
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams
from livedraft.speculation.stats import SpeculationStats


def run(
    prompts_path: Path,
    *,
    limit: int,
    max_tokens: int,
    draft: str,
    state: Path | None,
    model: str,
    dtype: str,
    threads: int | None,
    as_json: bool,
) -> None:
    prompts = read_prompts(prompts_path, limit)
    sampling = SamplingParams(max_tokens=max_tokens)
    with LLM(model, draft=draft, state=state, dtype=dtype, num_threads=threads) as llm:
        version = draft if is_whole_model(draft) else llm.engine.draft_version if llm.engine.draft else None
        print(f"{llm.path.description}; draft: {version}", file=sys.stderr)
        bar = Bar()
        token_ids = [llm.tokenizer.encode_chat(messages) for messages in prompts]
        speculative = Contender(llm, version, sampling) if version else None
        contenders: dict[str, Callable[[list[int]], list[int]]] = {
            "plain": Contender(llm, None, sampling),
            "transformers": transformers_generate(llm, model, max_tokens),
        }
        if speculative is not None:
            contenders["speculative"] = speculative
        for contender in contenders.values():  # warm up: caches and code paths
            contender(token_ids[0])
        if speculative is not None:
            speculative.stats = SpeculationStats()
        timings = alternate(contenders, token_ids, num_rounds=1, report=bar)
        bar.stop()
        result = _result(llm, version, speculative, timings)
        if speculative is not None:
            same = compare_outputs(
                token_ids, timings["plain"].outputs, timings["speculative"].outputs, resolve_model(model)
            )
            result |= {
                "same_output": same.num_same,
                "near_ties": len(same.near_tie_gaps),
                "near_tie_gaps": same.near_tie_gaps,
                "compared": same.num_compared,
            }
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(result)


def transformers_generate(
    llm: LLM, model: str, max_tokens: int, temperature: float = 0.0, assistant: Path | None = None
) -> Callable[[list[int]], list[int]]:
    """A contender: transformers' own generate with the same weights and threads, in the dtype that is its fastest here;
    `assistant` is a draft for it."""
    dtype = fitted(llm.path, None).dtype
    plain = replace(llm.path, is_compiled=False, is_prepacked=False, is_int8=False)
    opened = open_model(resolve_model(model), plain)
    hf_model = opened.hf_model
    if opened.native is not None:
        hf_model = transformers_model(opened.native.tensors, opened.native.config, dtype)
    helper = None
    if assistant is not None:
        helper = transformers.AutoModelForCausalLM.from_pretrained(assistant, dtype=dtype, local_files_only=True)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    def answer(prompt: list[int]) -> list[int]:
        prompt_BT = torch.tensor([prompt])
        output_BT = hf_model.generate(
            prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            max_new_tokens=max_tokens,
            assistant_model=helper,
            **sampling,
            eos_token_id=list(llm.tokenizer.eos_token_ids),
            pad_token_id=llm.tokenizer.eos_token_ids[0],
        )
        return output_BT[0, len(prompt) :].tolist()

    return answer


def _result(llm: LLM, version: str | None, speculative: Contender | None, timings: dict[str, Timing]) -> dict[str, Any]:
    costs = llm.engine.costs
    over_transformers, over_transformers_bound = median_with_lower_bound(
        timings["plain"].pair_ratios(timings["transformers"])
    )
    result: dict[str, Any] = {
        "execution": llm.path.description,
        "transformers_dtype": str(fitted(llm.path, None).dtype).removeprefix("torch."),
        "draft_version": version or "none",
        "num_prompts": len(timings["plain"].outputs),
        "plain_tokens_per_second": round(timings["plain"].tokens_per_second(), 2),
        "speculative_tokens_per_second": None,
        "transformers_tokens_per_second": round(timings["transformers"].tokens_per_second(), 2),
        "plain_over_transformers": round(over_transformers, 3),
        "plain_over_transformers_lower_bound": round(over_transformers_bound, 3),
        "num_speculative_tokens": 0,
        "c": round(costs.draft_cost, 4),
        "V": [round(costs.verify_cost(rows), 3) for rows in range(1, 10)],
    }
    if speculative is not None:
        speedup, speedup_bound = median_with_lower_bound(timings["speculative"].pair_ratios(timings["plain"]))
        result |= {
            "speculative_tokens_per_second": round(timings["speculative"].tokens_per_second(), 2),
            "speedup": round(speedup, 3),
            "speedup_lower_bound": round(speedup_bound, 3),
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "acceptance_rate": speculative.stats.acceptance_rate,
            "mean_acceptance_length": speculative.stats.mean_acceptance_length,
            "block_efficiency": speculative.stats.block_efficiency,
        }
    return result


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", title="livedraft bench speed (batch 1, greedy)")
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
