"""`livedraft bench speed`: plain, speculative and transformers' generate, batch 1, greedy, one interleaved run.

What the passes alone allow is S = E / (k c + V(k + 1)): E tokens a round, c a draft step and V(n) a target pass over n rows,
both isolated and in target passes over one row. `share_of_formula` is the measured speed-up of decoding over S, prompt by
prompt with the k that each round had: what is missing to 1 is our own overhead.

`as_served` is what a server does by default: the draft, and suffixes of the request's own text, of its own earlier answers and
of what the state folder keeps. `speculative` is the draft alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from livedraft.bench.alternate import (
    Timing,
    alternate,
    median_with_interval,
    median_with_lower_bound,
    pair_figures,
    ratio_figures,
)  # fmt: skip
from livedraft.bench.contender import Contender, decoding_ratios
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts
from livedraft.bench.rivals import Transformers
from livedraft.bench.same_output import compare_outputs
from livedraft.draft_source import is_whole_model
from livedraft.llm import LLM
from livedraft.models.native import fitted
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams

_COST_REPEATS = 9


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
        as_served = None
        if version:
            as_served = Contender(
                llm, version, sampling, uses_suffixes=True, keeps_traffic=True, earlier_texts=dict(llm.earlier_texts())
            )
        plain, rival = Contender(llm, None, sampling), Transformers(llm, model).contender(sampling)
        contenders: dict[str, Callable[[list[int]], list[int]]] = {
            "plain": plain,
            "transformers": lambda prompt: rival([prompt])[0],
        }
        if speculative is not None and as_served is not None:
            contenders |= {"speculative": speculative, "as_served": as_served}
        for contender in contenders.values():  # warm up: caches and code paths
            contender(token_ids[0])
        for own in (plain, speculative, as_served):
            if own is not None:
                own.forget_counts()
        timings = alternate(contenders, token_ids, num_rounds=1, report=bar)
        bar.stop()
        result = _result(llm, version, speculative, timings)
        if speculative is not None and as_served is not None:
            result |= _beside_formula(llm, plain, speculative)
            result["as_served"] = _as_served(plain, speculative, as_served, timings)
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


def _as_served(
    plain: Contender, speculative: Contender, as_served: Contender, timings: dict[str, Timing]
) -> dict[str, Any]:
    """With suffixes and traffic, over plain decoding and over the draft alone; with the prompt's time and without."""
    own = timings["as_served"]
    figures: dict[str, Any] = {
        "tokens_per_second": round(own.tokens_per_second(), 2),
        "acceptance_rate": as_served.stats.acceptance_rate,
        "block_efficiency": as_served.stats.block_efficiency,
    }
    for name, contender, timing in (
        ("plain", plain, timings["plain"]), ("draft_alone", speculative, timings["speculative"]),
    ):  # fmt: skip
        decoding = decoding_ratios(as_served.decodings, contender.decodings)
        figures[f"over_{name}"] = {
            "whole_answer": pair_figures(own, timing),
            "decoding_only": ratio_figures(decoding) if decoding else None,
        }
    return figures


def _beside_formula(llm: LLM, plain: Contender, speculative: Contender) -> dict[str, Any]:
    """Of decoding alone: a prompt is read by one pass whatever speculates."""
    costs = llm.engine.runner.measure_costs(speculative.draft, _COST_REPEATS, is_draft_isolated=True)
    measured, allowed = [], []
    for own, base in zip(speculative.decodings, plain.decodings, strict=True):
        if not own.drafted_by_round or not base.drafted_by_round:
            continue  # an answer of one token
        measured.append(own.num_tokens / own.seconds / (base.num_tokens / base.seconds))
        passes = [k * costs.draft_cost + costs.verify_cost(k + 1) for k in own.drafted_by_round]
        allowed.append(own.num_tokens / sum(passes))
    shares = [ratio / limit for ratio, limit in zip(measured, allowed, strict=True)]
    share, low, high = median_with_interval(shares)
    return {
        "c_isolated": round(costs.draft_cost, 4),
        "decoding_speedup": round(median(measured), 3),
        "formula_speedup": round(median(allowed), 3),
        "share_of_formula": round(share, 3),
        "share_of_formula_interval": [round(low, 3), round(high, 3)],
    }


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", title="livedraft bench speed (batch 1, greedy)")
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
