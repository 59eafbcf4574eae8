"""`livedraft bench lengths`: the adaptive draft length beside every fixed one, over a mixed stream, interleaved.

    measured              tokens a second of whole answers, prompts included; the ratio is of all seconds, its interval by
                          bootstrap over the prompts
    measured_decoding     of what comes after the first token: a prompt takes the same time whatever drafts
    computed              the same answers' rounds, at what their passes cost in a round, the costs that the policy chooses by:
                          k draft steps and a target pass over k + 1 rows each, so the machine's noise falls out and only the
                          choice of lengths is judged
    computed_isolated     the same with draft steps timed one after the other, their weights still in the caches

The best fixed length is known only in hindsight, and another stream has another. In the second part many requests are served at
once: there drafting may not pay at all, and the adaptive length must not be slower than plain decoding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from livedraft.bench.alternate import Timing, alternate, joined, median_with_interval
from livedraft.bench.contender import Contender
from livedraft.bench.machine import hardware
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_rows, spread
from livedraft.config import EngineConfig
from livedraft.device import versions
from livedraft.draft_source import is_whole_model
from livedraft.llm import LLM
from livedraft.records import SamplingParams, UserError
from livedraft.speculation.draft_length import CostModel

FIXED_DEFAULT = 4
"""What others draft in every round unless told otherwise."""
_NUM_RESAMPLES = 4000
_KINDS = ("measured", "measured_decoding", "computed", "computed_isolated")
_LEAST_GROUPS = 10
"""Alternating pairs under load."""


def run(
    *,
    prompts: Sequence[str],
    limit: int,
    fixed: Sequence[int],
    num_together: int,
    max_tokens: int,
    draft: str,
    state: Path | None,
    model: str,
    dtype: str,
    threads: int | None,
    as_json: bool,
) -> None:
    rows = [row for source in prompts for row in spread(read_rows(source, None), limit)]
    random.Random(0).shuffle(rows)
    sampling = SamplingParams(max_tokens=max_tokens)
    config = EngineConfig(max_num_seqs=num_together)
    bar = Bar()
    with LLM(model, draft=draft, state=state, dtype=dtype, num_threads=threads, engine=config) as llm:
        resident = llm.engine.draft
        if resident is None:
            raise UserError("There is no draft to choose lengths for; name one with --draft.")
        token_ids = [
            llm.tokenizer.encode_chat(row.messages)[-(llm.engine.config.max_model_len - max_tokens) :] for row in rows
        ]
        contenders = {
            "plain": Contender(llm, None, sampling),
            "adaptive": Contender(llm, resident, sampling),
            **{
                f"fixed {k}": Contender(llm, resident, sampling, num_speculative_tokens=k)
                for k in sorted({*fixed, FIXED_DEFAULT})
            },
        }
        for contender in contenders.values():  # warm up: caches and code paths
            contender(token_ids[0])
            contender.forget_counts()
        timings = alternate(contenders, token_ids, num_rounds=1, report=bar, name="lengths")
        isolated = llm.engine.runner.measure_costs(resident, is_draft_isolated=True)
        result = _alone(contenders, timings, llm.engine.costs, isolated)
        result["together"] = _together(llm, contenders, token_ids, num_together, bar)
        result |= {
            "draft": draft if is_whole_model(draft) else resident.version,
            "execution": llm.path.description,
            "prompts": len(rows),
            "max_tokens": max_tokens,
            "versions": versions(),
            "hardware": hardware(),
        }
    bar.stop()
    print(json.dumps(result)) if as_json else _print(result)


def _alone(
    contenders: Mapping[str, Contender], timings: Mapping[str, Timing], costs: CostModel, isolated: CostModel
) -> dict[str, Any]:
    by_kind = {
        "measured": {name: np.array([timing.num_tokens[0], timing.seconds[0]]) for name, timing in timings.items()},
        "measured_decoding": {
            name: np.array([(one.num_tokens, one.seconds) for one in c.decodings]).T for name, c in contenders.items()
        },
        "computed": _computed(contenders, costs),
        "computed_isolated": _computed(contenders, isolated),
    }
    fixed = [name for name in contenders if name.startswith("fixed")]
    result: dict[str, Any] = {
        "c": round(costs.draft_cost, 4),
        "c_isolated": round(isolated.draft_cost, 4),
        "verify_cost": {str(k + 1): round(costs.verify_cost(k + 1), 3) for k in (1, 2, 4, 8)},
        "acceptance_rate": {name: c.stats.acceptance_rate for name, c in contenders.items() if name != "plain"},
        "drafted_a_round": {
            name: round(c.stats.num_draft_tokens / max(1, sum(len(one.drafted_by_round) for one in c.decodings)), 2)
            for name, c in contenders.items()
            if name != "plain"
        },
    }
    for kind, figures in by_kind.items():
        speeds = {name: float(tokens.sum() / seconds.sum()) for name, (tokens, seconds) in figures.items()}
        best = max(fixed, key=speeds.__getitem__)
        result[kind] = {
            "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
            "best_fixed": int(best.split()[1]),
            **{
                f"adaptive_over_{label}": ratio_of_sums(figures["adaptive"], figures[name])
                for label, name in (
                    ("best_fixed", best),
                    ("fixed_default", f"fixed {FIXED_DEFAULT}"),
                    ("plain", "plain"),
                )
            },
        }
    return result


def _computed(contenders: Mapping[str, Contender], costs: CostModel) -> dict[str, np.ndarray]:
    """Tokens and seconds of each answer's rounds."""
    return {
        name: np.array([(one.num_tokens, seconds_of_rounds(one.drafted_by_round, costs)) for one in c.decodings]).T
        for name, c in contenders.items()
    }


def seconds_of_rounds(drafted_by_round: Sequence[int], costs: CostModel) -> float:
    """What rounds with so many drafted tokens cost, one request alone."""
    return sum(k * costs.draft_step_seconds(1) + costs.target_seconds(k + 1) for k in drafted_by_round)


def ratio_of_sums(own: np.ndarray, other: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Tokens a second of one over the other's, all prompts together; 95 % interval by bootstrap over the prompts. Both hold a
    row of tokens and one of seconds, in the same order of prompts."""
    picks = np.random.default_rng(seed).integers(0, own.shape[1], size=(_NUM_RESAMPLES, own.shape[1]))

    def speed(figures: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        speeds: np.ndarray = figures[0][chosen].sum(-1) / figures[1][chosen].sum(-1)
        return speeds

    everything = np.arange(own.shape[1])
    low, high = np.quantile(speed(own, picks) / speed(other, picks), (0.025, 0.975))
    ratio = float(speed(own, everything) / speed(other, everything))
    return {"ratio": round(ratio, 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def _together(
    llm: LLM, contenders: Mapping[str, Contender], token_ids: Sequence[list[int]], num_together: int, bar: Bar
) -> dict[str, Any]:
    num_groups = max(_LEAST_GROUPS, len(token_ids) // num_together)
    groups = [
        [token_ids[(group * num_together + place) % len(token_ids)] for place in range(num_together)]
        for group in range(num_groups)
    ]
    timings = alternate(
        {name: joined(contenders[name].together) for name in ("plain", "adaptive")}, groups, num_rounds=1, report=bar,
        name=f"{num_together} together",
    )  # fmt: skip
    ratio, low, high = median_with_interval(timings["adaptive"].pair_ratios(timings["plain"]))
    return {
        "requests": num_together, "groups": num_groups, "adaptive_over_plain": round(ratio, 3),
        "interval": [round(low, 3), round(high, 3)],
    }  # fmt: skip


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "draft length", "tokens/s", "decoding only", "computed", "drafted a round", "accepted",
        title="livedraft bench lengths",
    )  # fmt: skip
    for name, speed in result["measured"]["tokens_per_second"].items():
        rate = result["acceptance_rate"].get(name)
        table.add_row(
            name, f"{speed:.1f}", f"{result['measured_decoding']['tokens_per_second'][name]:.1f}",
            f"{result['computed']['tokens_per_second'][name]:.1f}",
            f"{result['drafted_a_round'].get(name, 0):.2f}", "–" if rate is None else f"{rate:.2f}",
        )  # fmt: skip
    Console().print(table)
    for kind in _KINDS:
        figures = result[kind]
        shown = ", ".join(
            f"{label.replace('_', ' ')} × {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            for label, ratio in (
                (name, figures[f"adaptive_over_{name}"]) for name in ("best_fixed", "fixed_default", "plain")
            )
        )
        print(f"adaptive, {kind.replace('_', ' ')}: over {shown}; the best fixed length is {figures['best_fixed']}")
    together = result["together"]
    print(f"{together['requests']} together: × {together['adaptive_over_plain']:.3f} {together['interval']} of plain")
