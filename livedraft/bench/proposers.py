"""`livedraft bench proposers`: plain decoding, suffixes alone, the draft alone and both, stream by stream, interleaved.

A stream is a prompt file or, within one, a topic; with `--second-turns` the conversations that have a second turn are asked it,
after the target's own first answer.

    suffix, suffix_and_draft                              suffixes of the request's own text alone; nothing is kept
    suffix_with_traffic, suffix_with_traffic_and_draft    and of this contender's own earlier answers of the stream, as served

    whole_answer      tokens a second with the time of the prompt, which no proposer shortens
    decoding_only     of what comes after the first token
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from livedraft.bench.alternate import Timing, alternate, pair_figures, ratio_figures
from livedraft.bench.contender import Contender, decoding_ratios
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import Row, read_rows, spread
from livedraft.bench.same_output import compare_outputs
from livedraft.draft_source import is_whole_model
from livedraft.llm import LLM
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams, UserError

_ALONE_OF_BOTH = {
    "suffix_and_draft": ("suffix", "draft"),
    "suffix_with_traffic_and_draft": ("suffix_with_traffic", "draft"),
}
"""What each combination is compared with."""


def run(
    *,
    prompts: Sequence[str],
    limit: int,
    topics: Sequence[str],
    second_turns: bool,
    max_tokens: int,
    temperature: float,
    draft: str,
    state: Path | None,
    model: str,
    dtype: str,
    threads: int | None,
    as_json: bool,
) -> None:
    streams = _streams(prompts, limit, topics, second_turns)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with LLM(model, draft=draft, state=state, dtype=dtype, num_threads=threads) as llm:
        if llm.engine.draft is None:
            raise UserError("There is no draft to compare with; name one with --draft.")
        version = draft if is_whole_model(draft) else llm.engine.draft_version
        results = {}
        for name, rows in streams.items():
            token_ids = [_prompt(llm, row, max_tokens) for row in rows]
            results[name] = _stream(llm, version, sampling, token_ids, model, name)
    result = {"draft": version, "max_tokens": max_tokens, "temperature": temperature, "streams": results}
    print(json.dumps(result)) if as_json else _print(result)


def _streams(prompts: Sequence[str], limit: int, topics: Sequence[str], second_turns: bool) -> dict[str, list[Row]]:
    """At most `limit` rows of each stream, from the whole of it: some files are sorted by topic."""
    streams: dict[str, list[Row]] = {}
    for source in prompts:
        for row in read_rows(source, None):
            name = row.topic if topics and row.topic else Path(source).stem
            if topics and name not in topics:
                continue
            if not second_turns or row.second_turn is None:
                streams.setdefault(name, []).append(row)
            if second_turns and row.second_turn is not None:
                streams.setdefault("second turns", []).append(row)
    if not streams:
        raise UserError("No prompt is of the topics asked for.")
    return {name: spread(rows, limit) for name, rows in streams.items()}


def _prompt(llm: LLM, row: Row, max_tokens: int) -> list[int]:
    """Tokens; of a second turn with what the target says to the first."""
    messages = row.messages
    if row.second_turn is not None:
        answer = llm.generate([messages], SamplingParams(max_tokens=max_tokens), store=False)[0].text
        messages = [
            *messages, {"role": "assistant", "content": answer}, {"role": "user", "content": row.second_turn}
        ]  # fmt: skip
    return llm.tokenizer.encode_chat(messages)[-(llm.engine.config.max_model_len - max_tokens) :]


def _stream(
    llm: LLM, version: str, sampling: SamplingParams, token_ids: list[list[int]], model: str, name: str
) -> dict[str, Any]:
    contenders = {
        "plain": Contender(llm, None, sampling),
        "suffix": Contender(llm, None, sampling, uses_suffixes=True),
        "suffix_with_traffic": Contender(llm, None, sampling, uses_suffixes=True, keeps_traffic=True),
        "draft": Contender(llm, version, sampling),
        "suffix_and_draft": Contender(llm, version, sampling, uses_suffixes=True),
        "suffix_with_traffic_and_draft": Contender(llm, version, sampling, uses_suffixes=True, keeps_traffic=True),
    }
    for contender in contenders.values():  # warm up: caches and code paths
        contender(token_ids[0])
        contender.forget_counts()
    bar = Bar()
    timings = alternate(
        contenders,
        token_ids,
        num_rounds=1,
        report=bar,
        name=name,
    )
    bar.stop()
    figures: dict[str, Any] = {
        "num_prompts": len(token_ids),
        "mean_prompt_tokens": round(sum(map(len, token_ids)) / len(token_ids)),
        "plain_tokens_per_second": round(timings["plain"].tokens_per_second(), 1),
    }
    for one in contenders:
        if one != "plain":
            figures[one] = _ratios(one, "plain", timings, contenders) | {
                "acceptance_rate": contenders[one].stats.acceptance_rate,
                "block_efficiency": contenders[one].stats.block_efficiency,
            }
    for both, each_alone in _ALONE_OF_BOTH.items():
        for one in each_alone:
            figures[f"{both}_over_{one}"] = _ratios(both, one, timings, contenders)
    if sampling.is_greedy:
        same = compare_outputs(
            token_ids, timings["plain"].outputs, timings["suffix_with_traffic_and_draft"].outputs, resolve_model(model)
        )
        figures |= {"same_output": same.num_same, "near_ties": len(same.near_tie_gaps), "compared": same.num_compared}
    return figures


def _ratios(
    own: str, other: str, timings: Mapping[str, Timing], contenders: Mapping[str, Contender]
) -> dict[str, dict[str, float] | None]:
    """With the prompt's time and without. The second is None where every answer is one token."""
    decoding = decoding_ratios(contenders[own].decodings, contenders[other].decodings)
    return {
        "whole_answer": pair_figures(timings[own], timings[other]),
        "decoding_only": ratio_figures(decoding) if decoding else None,
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    ways = ("suffix", "suffix_with_traffic", "draft", "suffix_and_draft", "suffix_with_traffic_and_draft")
    for kind in ("whole_answer", "decoding_only"):
        table = Table(
            "stream", "prompts", "plain, tokens/s", *(way.replace("_", " ") for way in ways),
            title=f"× plain, {kind.replace('_', ' ')} (lower 95 % bound)",
        )  # fmt: skip
        for name, figures in result["streams"].items():
            ratios = [figures[way][kind] for way in ways]
            table.add_row(
                name, str(figures["num_prompts"]), str(figures["plain_tokens_per_second"]),
                *("–" if one is None else f"{one['ratio']:.2f} ({one['lower_bound']:.2f})" for one in ratios),
            )  # fmt: skip
        Console().print(table)
