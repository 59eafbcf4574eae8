"""`livedraft bench acceptance`: how often a draft is accepted, by every definition in use, with intervals.

Two sources. Real speculative decoding with a fixed draft length gives what a server would count. The same texts, teacher-forced
through the draft, give alpha, which asks at every position and not only where the chain happened to get to.

Intervals are 95 % and by the bootstrap over requests: a ratio of sums is drawn again as the ratio of sums over requests drawn
with replacement, because positions of one request are not independent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from livedraft.bench.progress import Bar
from livedraft.bench.prompts import Row, as_prompt, read_rows
from livedraft.config import EngineConfig, LearningConfig, SpeculationConfig
from livedraft.drafts.weights import DraftWeights
from livedraft.learning.batches import Example, collate, example_from_trace, micro_batches
from livedraft.learning.forward import TargetParts, forward_of
from livedraft.learning.trainer import Trainer
from livedraft.llm import LLM
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams, Trace, UserError
from livedraft.sampling import DRAFT_DRAW, counter_key

DEFINITIONS = {
    "alpha": "mean over requests of the mean over all output positions of sum_v min(target prob, draft prob), both at "
    "temperature 1; a lower bound, since the target's 64 likeliest tokens are known",
    "argmax_match": "share of output positions, drafted or not, where both models' likeliest token is the same",
    "acceptance_rate": "accepted / drafted tokens, rejected rounds' later tokens counted as drafted",
    "reached_rate": "accepted / (accepted + rejected): tokens drafted after a rejection are left out (the papers' alpha when "
    "greedy)",
    "mean_acceptance_length": "1 + accepted / rounds, over rounds with a draft",
    "block_efficiency": "emitted tokens / target passes, all rounds",
    "by_position": "share of drafts whose first, second, ... token was accepted together with all before it",
}
_RESAMPLES = 1000
_FREQUENT = 20


@dataclass(kw_only=True)
class _Counts:
    """One request's speculation."""

    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    rounds: int = 0
    emitted: int = 0
    passes: int = 0


def run(
    *,
    prompts: Sequence[str],
    limit: int,
    draft: str,
    before: str | None,
    temperatures: Sequence[float],
    k: int,
    max_tokens: int,
    seed: int,
    state: Path | None,
    model: str,
    dtype: str,
    threads: int | None,
    as_json: bool,
) -> None:
    rows = [(row.topic or Path(source).stem, row) for source in prompts for row in read_rows(source, limit)]
    with LLM(
        model, draft=draft, state=state, dtype=dtype, num_threads=threads, engine=EngineConfig(max_num_seqs=8),
        speculation=SpeculationConfig(num_speculative_tokens=k, suffix_decoding=False),
    ) as llm:  # fmt: skip
        if llm.engine.draft is None:
            raise UserError("There is no draft to measure; name one with --draft.")
        llm.engine.draft.keep_logits = True  # or traces leave out what was drafted
        version = llm.engine.draft_version if draft == "auto" else draft
        drafts = {"draft": llm.draft_weights(version)}
        if before is not None:
            drafts["before"] = llm.draft_weights(before)
        result: dict[str, Any] = {
            "draft": version, "before": before, "k": k, "seed": seed, "num_prompts": len(rows), "definitions": DEFINITIONS,
        }  # fmt: skip
        for temperature in temperatures:
            traces = _served(llm, rows, temperature, max_tokens, seed)
            figures = _figures(traces, rows, drafts, resolve_model(model))
            for row in figures["frequent_tokens"]["tokens"]:
                row["text"] = llm.tokenizer.decode([row["id"]], with_special_tokens=True)
            result[f"temperature_{temperature:g}"] = figures
    print(json.dumps(result)) if as_json else _print(result, temperatures)


def _served(llm: LLM, rows: Sequence[tuple[str, Row]], temperature: float, max_tokens: int, seed: int) -> list[Trace]:
    """With speculation, in the prompts' order. Draws follow from the seed; judged by rejection sampling, as unseeded requests
    are."""
    found: dict[str, Trace] = {}
    llm.engine.trace_sink = lambda trace: found.update({trace.request_id: trace})
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    requests = [
        llm.request(as_prompt(llm.tokenizer, row), sampling, id=str(number)) for number, (_, row) in enumerate(rows)
    ]
    for number, queued in enumerate(llm.add(requests)):
        queued.seed = counter_key(seed, number, DRAFT_DRAW)  # in place of one of its own
    bar = Bar()
    llm.run(after_round=lambda: bar(f"requests at temperature {temperature:g}", len(found), len(rows)))
    bar.stop()
    return [found[request.id] for request in requests]


def _figures(
    traces: Sequence[Trace], rows: Sequence[tuple[str, Row]], drafts: dict[str, DraftWeights], target: Path
) -> dict[str, Any]:
    counts = [_counts(trace) for trace in traces]
    examples = [example_from_trace(trace, number) for number, trace in enumerate(traces)]
    scored = {name: _scores(weights, examples, target) for name, weights in drafts.items()}
    figures = _live_figures(counts) | _alphas(scored["draft"][0])
    figures["by_position"] = _by_position(traces)
    if "before" in scored:
        figures["before"] = _alphas(scored["before"][0])
    topics: dict[str, list[int]] = {}
    for number, (topic, _) in enumerate(rows):
        topics.setdefault(topic, []).append(number)
    if len(topics) > 1:
        figures["by_topic"] = {
            topic: {"num_prompts": len(numbers)}
            | _live_figures([counts[number] for number in numbers])
            | _alphas([scored["draft"][0][number] for number in numbers])
            for topic, numbers in topics.items()
        }
    figures["frequent_tokens"] = _frequent_tokens(examples, {name: guesses for name, (_, guesses) in scored.items()})
    return figures


# --- counted while serving --------------------------------------------------------------------------------------------


def _counts(trace: Trace) -> _Counts:
    rounds = _rounds(trace)
    is_reached_P = ~trace.drafted_off_path_P
    return _Counts(
        drafted=len(trace.drafted_token_id_P),
        accepted=int(trace.drafted_accepted_P.sum()),
        reached=int(is_reached_P.sum()),
        rounds=len(rounds),
        emitted=len(trace.output_token_ids),
        passes=len(np.unique(trace.round_number_T)),
    )


def _rounds(trace: Trace) -> list[np.ndarray]:
    """Accepted flags, draft by draft. A draft's later tokens follow an accepted one, or are off the path."""
    accepted_P, off_path_P, position_P = trace.drafted_accepted_P, trace.drafted_off_path_P, trace.drafted_position_P
    starts = [
        index
        for index in range(len(accepted_P))
        if index == 0
        or (
            not off_path_P[index]
            and (not accepted_P[index - 1] or off_path_P[index - 1] or position_P[index] != position_P[index - 1] + 1)
        )
    ]
    return np.split(accepted_P, starts[1:]) if starts else []


def _live_figures(counts: Sequence[_Counts]) -> dict[str, Any]:
    sums = {name: np.array([getattr(one, name) for one in counts], dtype=float) for name in _Counts.__annotations__}
    ratios = {
        "acceptance_rate": (sums["accepted"], sums["drafted"]),
        "reached_rate": (sums["accepted"], sums["reached"]),
        "mean_acceptance_length": (sums["accepted"] + sums["rounds"], sums["rounds"]),
        "block_efficiency": (sums["emitted"], sums["passes"]),
    }
    return {name: _ratio(*pair) for name, pair in ratios.items()}


def _ratio(upper: np.ndarray, lower: np.ndarray) -> dict[str, float] | None:
    """The ratio of the sums, with its interval; None where nothing was counted."""
    if lower.sum() == 0:
        return None
    drawn = np.random.default_rng(0).integers(0, len(upper), (_RESAMPLES, len(upper)))
    uppers, lowers = upper[drawn].sum(1), lower[drawn].sum(1)
    ratios = uppers[lowers > 0] / lowers[lowers > 0]  # late positions are drafted in few requests
    low, high = np.quantile(ratios, (0.025, 0.975))
    return {
        "mean": round(float(upper.sum() / lower.sum()), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
    }


def _by_position(traces: Sequence[Trace]) -> list[dict[str, float] | None]:
    by_request = [_rounds(trace) for trace in traces]
    longest = max((len(one) for rounds in by_request for one in rounds), default=0)
    figures = []
    for position in range(longest):
        here = [[one[: position + 1].all() for one in rounds if len(one) > position] for rounds in by_request]
        figures.append(_ratio(np.array([sum(one) for one in here], float), np.array([len(one) for one in here], float)))
    return figures


# --- asked of the draft at every position -----------------------------------------------------------------------------


def _scores(
    weights: DraftWeights, examples: Sequence[Example], target: Path
) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    """((alpha, argmax match), the draft's likeliest token at each position), request by request."""
    parts = TargetParts.load(target, weights)
    longest = max(example.num_tokens for example in examples) + 1
    trainer = Trainer(config=LearningConfig(learning_rate=1e-3), target=parts, draft=weights, max_positions=longest)
    trainer.uses_bf16 = False  # the same figures on every machine, and from the same logits as the guesses
    scores = trainer.score(examples, weights)
    return [(score.alpha, score.alpha_t0) for score in scores], _guesses(weights, parts, examples, longest)


@torch.inference_mode()
def _guesses(weights: DraftWeights, parts: TargetParts, examples: Sequence[Example], longest: int) -> list[np.ndarray]:
    forward = forward_of(weights, parts, longest)
    no_lookup_V = torch.full((parts.vocabulary_size,), -1)
    guesses: dict[int, np.ndarray] = {}
    for batch_of in micro_batches(examples, 2048):
        batch = collate(batch_of, no_lookup_V, every_position=True)
        hidden_ND = forward.hidden(batch.token_ids_BT)[batch.loss_rows_N]
        rows_N = torch.cat([forward.head(some).argmax(-1) for some in hidden_ND.split(512)])
        ids_N = weights.draft_to_target_W[rows_N].numpy()
        for index, example in enumerate(batch_of):
            guesses[example.trace_id] = ids_N[(batch.example_N == index).numpy()]
    return [guesses[example.trace_id] for example in examples]


def _alphas(scores: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ones = np.ones(len(scores))
    return {
        name: _ratio(np.array(values), ones)
        for name, values in zip(("alpha", "argmax_match"), zip(*scores, strict=True), strict=True)
    }


def _frequent_tokens(examples: Sequence[Example], guesses: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """As OSD analyses it (2310.07177, section 5): of the target's most frequent tokens, how many of the draft's guesses of them
    are right (precision, None for what it never guesses) and how many of their occurrences it guesses (recall): token by
    token, most frequent first, and the mean over them."""
    counts = Counter(int(token) for example in examples for token in example.output_token_ids)
    frequent = [token for token, _ in counts.most_common(_FREQUENT)]
    truth = np.concatenate([example.output_token_ids for example in examples])
    tokens: list[dict[str, Any]] = [{"id": token, "num_occurrences": counts[token]} for token in frequent]
    result: dict[str, Any] = {
        "num_tokens": len(frequent),
        "share_of_output": round(sum(counts[token] for token in frequent) / len(truth), 4),
    }
    for name, by_request in guesses.items():
        guessed = np.concatenate(by_request)
        is_right = guessed == truth
        precision = [_share(is_right[guessed == token]) for token in frequent]
        recall = [_share(is_right[truth == token]) for token in frequent]
        for row, *pair in zip(tokens, precision, recall, strict=True):
            row[name] = dict(zip(("precision", "recall"), pair, strict=True))
        result[name] = {"precision": _mean_of_known(precision), "recall": _mean_of_known(recall)}
    return result | {"tokens": tokens}


def _share(is_right: np.ndarray) -> float | None:
    return round(float(is_right.mean()), 4) if len(is_right) else None


def _mean_of_known(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return round(float(np.mean(known)), 4) if known else None


# --- printed ----------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any], temperatures: Sequence[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = [result[f"temperature_{one:g}"] for one in temperatures]
    title = f"acceptance of {result['draft']}, k = {result['k']}"
    table = Table("figure", *(f"temperature {one:g}" for one in temperatures), title=title)
    for name in DEFINITIONS:
        if name == "by_position":
            for position in range(max(len(one[name]) for one in columns)):
                shown = (_shown(one[name][position]) if position < len(one[name]) else "–" for one in columns)
                table.add_row(f"{name}, {position + 1}", *shown)
        else:
            table.add_row(name, *(_shown(one[name]) for one in columns))
    console.print(table)
    for temperature, figures in zip(temperatures, columns, strict=True):
        for topic, own in figures.get("by_topic", {}).items():
            alpha, rate = _shown(own["alpha"]), _shown(own["acceptance_rate"])
            console.print(f"temperature {temperature:g}, {topic}: alpha {alpha}, accepted / drafted {rate}")
        console.print(_table_of_tokens(figures["frequent_tokens"], temperature))
    for name, words in DEFINITIONS.items():
        console.print(f"[bold]{name}[/bold]: {words}")


def _table_of_tokens(frequent: dict[str, Any], temperature: float) -> Any:
    from rich.table import Table
    from rich.text import Text

    names = [name for name in ("before", "draft") if name in frequent]
    title = f"frequent tokens at temperature {temperature:g}, {frequent['share_of_output']:.0%} of the output"
    table = Table("token", "times", *(f"{name}: precision, recall" for name in names), title=title)
    for row in frequent["tokens"]:
        table.add_row(Text(repr(row["text"])), str(row["num_occurrences"]), *(_pair(row[name]) for name in names))
    table.add_row("mean", "", *(_pair(frequent[name]) for name in names))
    return table


def _pair(figures: dict[str, float | None]) -> str:
    return ", ".join("–" if one is None else f"{one:.2f}" for one in (figures["precision"], figures["recall"]))


def _shown(figure: dict[str, float] | None) -> str:
    return "–" if figure is None else f"{figure['mean']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
