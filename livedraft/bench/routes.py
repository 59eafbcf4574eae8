"""`livedraft bench routes`: several drafts against one, on a mixed stream of recorded requests.

The training process's own loop (`learning/team.py`) reruns the stream twice: with one draft for everything, whose requests
bear no route's name, and with routing. The steps that the first has taken after each burst are the second's allowance. Before
a burst of requests reaches either, each of its requests is scored under every draft in service, so over the last third of the
stream six ways of choosing are compared on the same texts:
    routed         the draft that routing has given the request's stream
    shared         the one draft of the run without routing
    oracle         the best draft for each request, seen afterwards; of several alike the luckiest, so it lies above what any
                   rule can reach
    stream_oracle  the best draft for each stream, seen afterwards
    random         any of the routed run's drafts: their mean
    classifier     the draft of the request's own route wherever there is one, whatever the verdicts say; drafts and their
                   streams are those of the routed run

The router reads each prompt's text, in the order of the stream, as it does in a server.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from livedraft.bench.alternate import mean_with_bounds
from livedraft.bench.arms import Learner, Report, learner_of, serve_canaries
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts, spread
from livedraft.bench.replay import record
from livedraft.config import EngineConfig, LearningConfig, RouteKind, RoutingConfig
from livedraft.drafts.registry import Registry
from livedraft.drafts.router import Router
from livedraft.drafts.weights import save_draft
from livedraft.learning.batches import example_from_trace
from livedraft.learning.store import TraceStore, read_recorded, write_shard
from livedraft.learning.team import Team
from livedraft.llm import LLM, root_texts
from livedraft.records import DEFAULT_ROUTE, RouteHints, SamplingParams, Trace, UserError
from livedraft.tokenizer import Message

BURST = 16
STEPS_PER_REQUEST = 0.75
"""Optimiser steps that the shared draft may take: one for every two new requests, and half as many on replayed ones alone."""
LARGEST_DIFFERENCE = 0.02
"""Of the two runs' steps, as a share; beyond it the updates are not equal, and the report says so."""
WAYS = ("routed", "shared", "oracle", "stream_oracle", "random", "classifier")
ROUTE_KINDS: tuple[RouteKind, ...] = ("system_prompt", "language", "topic")
"""What streams are told apart by where the settings do not say it."""
JUDGED_SHARE = 1 / 3
"""The last requests of the stream, that the figures are of."""


@dataclass(kw_only=True)
class Run:
    """Acceptance of each request, in order, under each route's draft at its arrival; and what the run came to."""

    alphas: list[dict[str, float]] = field(default_factory=list)
    routed_to: list[str] = field(default_factory=list)
    steps_by_burst: list[int] = field(default_factory=list)
    """Taken so far, at the end of each."""
    num_promoted: int = 0
    opened: list[str] = field(default_factory=list)


def run(
    *,
    prompt_files: Sequence[Path],
    limit: int,
    from_traces: Sequence[Path],
    save_traces: Path | None,
    max_tokens: int,
    model: str,
    dtype: str,
    learning: LearningConfig,
    routing: RoutingConfig,
    as_json: bool,
) -> None:
    routing = routing if routing.by else replace(routing, by=ROUTE_KINDS)
    bar = Bar()
    prompts = {path.stem: read_prompts(path, 10**6) for path in prompt_files}
    with LLM(model, dtype=dtype, engine=EngineConfig(max_num_seqs=1, num_prefix_slots=0)) as llm:
        learner = learner_of(llm, model, learning, BURST)
        token_ids = {
            name: [tuple(llm.request(messages).prompt_token_ids) for messages in rows] for name, rows in prompts.items()
        }
    if from_traces:
        recorded = {tuple(t.prompt_token_ids): t for path in from_traces for t in read_recorded(path)}
    else:
        chosen = [(name, row) for name, rows in prompts.items() for row in spread(rows, limit)]
        sampling = SamplingParams(max_tokens=max_tokens)
        traces, _ = record(chosen, sampling, BURST, model, dtype, learning, bar)
        recorded = {tuple(trace.prompt_token_ids): trace for trace in traces}
    if save_traces is not None:
        write_shard(save_traces, list(recorded.values()))
    stream: list[tuple[str, list[Message], Trace]] = []
    for name, rows in prompts.items():
        known = [(name, row, recorded[ids]) for row, ids in zip(rows, token_ids[name], strict=True) if ids in recorded]
        stream += spread(known, limit)
    if len(stream) < 3 * BURST:
        raise UserError(f"Of these prompts {len(stream)} are recorded; a comparison needs at least {3 * BURST}.")
    random.Random(learning.seed).shuffle(stream)
    labels, router_ms = _labels(routing, [messages for _, messages, _ in stream])
    traces = [
        replace(trace, request_id=f"{name}#{number}", route=label)
        for number, ((name, _, trace), label) in enumerate(zip(stream, labels, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        alike = [replace(trace, route=DEFAULT_ROUTE) for trace in traces]
        most = [int(STEPS_PER_REQUEST * min(n + BURST, len(traces))) for n in range(0, len(traces), BURST)]
        shared = _rerun(alike, learner, replace(routing, enabled=False), most, Path(folder) / "shared", bar)
        routed = _rerun(traces, learner, routing, shared.steps_by_burst, Path(folder) / "routed", bar)
    bar.stop()
    result = _figures(shared, routed, labels, [name for name, _, _ in stream], learning.seed)
    result |= {"model": model, "seed": learning.seed, "requests": len(stream)}
    result |= {
        "router_ms": round(float(np.mean(router_ms)), 3),
        "router_p99_ms": round(float(np.quantile(router_ms, 0.99)), 3),
    }
    print(json.dumps(result)) if as_json else _print(result)


def _labels(routing: RoutingConfig, prompts: Sequence[Sequence[Message]]) -> tuple[list[str], list[float]]:
    """Each request's route, and what finding it took, in milliseconds."""
    router = Router(routing, secret=b"bench")
    labels, milliseconds = [], []
    for messages in prompts:
        system, user = root_texts(messages)
        started = time.perf_counter()
        labels.append(router.route_of(system, user, RouteHints()))
        milliseconds.append(1000 * (time.perf_counter() - started))
    return labels, milliseconds


def _rerun(
    traces: Sequence[Trace],
    learner: Learner,
    routing: RoutingConfig,
    most_steps: Sequence[int],
    folder: Path,
    report: Report,
) -> Run:
    """As the training process would have it, burst by burst; `most_steps`: that may be taken by the end of each."""
    store, registry = TraceStore(folder), Registry(folder)
    registry.publish(lambda path: save_draft(learner.untrained, path), learner.version, status="in_service")
    team = Team(
        state=folder, target=learner.target, config=learner.config, routing=routing, max_positions=learner.max_positions
    )
    run = Run()
    first_judged = len(traces) - int(JUDGED_SHARE * len(traces))
    for first, num_allowed in zip(range(0, len(traces), learner.burst), most_steps, strict=True):
        burst = traces[first : first + learner.burst]
        if first + len(burst) > first_judged:
            run.alphas += team.alphas_by_route(
                [example_from_trace(trace, -1 - first - i) for i, trace in enumerate(burst)]
            )
        else:
            run.alphas += [{}] * len(burst)
        run.routed_to += [team.routing.route_of(trace.route) for trace in burst]
        versions = [team.workers[route].in_service.id for route in run.routed_to[first:]]
        store.append([replace(trace, draft_version=v) for trace, v in zip(burst, versions, strict=True)])
        while team.num_steps < num_allowed and team.turn():
            run.num_promoted += sum(serve_canaries(registry, route) for route in team.workers)
        run.steps_by_burst.append(team.num_steps)
        kind = "with routes" if routing.enabled else "one draft"
        report(f"{kind}, {len(team.workers)} drafts", first + len(burst), len(traces))
    run.opened = list(team.routing.open)
    return run


def _figures(shared: Run, routed: Run, labels: Sequence[str], groups: Sequence[str], seed: int) -> dict[str, Any]:
    judged = [i for i in range(len(groups)) if routed.alphas[i] and shared.alphas[i]]
    best_draft = _best_by_stream([labels[i] for i in judged], [routed.alphas[i] for i in judged])
    by_way: dict[str, list[float]] = {name: [] for name in WAYS}
    for i in judged:
        alphas = routed.alphas[i]
        by_way["routed"].append(alphas[routed.routed_to[i]])
        by_way["shared"].append(shared.alphas[i][DEFAULT_ROUTE])
        by_way["oracle"].append(max(alphas.values()))
        by_way["stream_oracle"].append(alphas.get(best_draft[labels[i]], alphas[DEFAULT_ROUTE]))
        by_way["random"].append(sum(alphas.values()) / len(alphas))
        by_way["classifier"].append(alphas.get(labels[i], alphas[DEFAULT_ROUTE]))
    result: dict[str, Any] = {f"{name}_alpha": mean_with_bounds(values, seed) for name, values in by_way.items()}
    gains = _differences(by_way, "routed", "shared")
    result["gain"] = mean_with_bounds(gains, seed)
    for oracle in ("oracle", "stream_oracle"):
        result[f"below_{oracle}"] = mean_with_bounds(_differences(by_way, oracle, "routed"), seed)
    result["by_stream"] = {}
    for group in dict.fromkeys(groups):
        places = [place for place, i in enumerate(judged) if groups[i] == group]
        if places:
            result["by_stream"][group] = {
                "requests": len(places),
                **{name: round(float(np.mean([values[p] for p in places])), 4) for name, values in by_way.items()},
                "gain": mean_with_bounds([gains[p] for p in places], seed),
            }
    updates = {"shared": shared.steps_by_burst[-1], "routed": routed.steps_by_burst[-1]}
    result["updates"] = updates
    one_turn = 1 + len(routed.opened)  # each worker may take a step in it
    most = max(one_turn, LARGEST_DIFFERENCE * updates["shared"])
    result["are_updates_equal"] = max(updates.values()) - min(updates.values()) <= most
    result["versions_promoted"] = {"shared": shared.num_promoted, "routed": routed.num_promoted}
    result["routes"] = routed.opened
    pairs = Counter(zip(groups, labels, strict=True))
    result["labels"] = {
        group: {label: count for (name, label), count in pairs.most_common() if name == group}
        for group in dict.fromkeys(groups)
    }
    return result


def _best_by_stream(streams: Sequence[str], alphas: Sequence[dict[str, float]]) -> dict[str, str]:
    """The draft with the highest mean, of those that were there for every one of the stream's requests."""
    found = {}
    for stream in dict.fromkeys(streams):
        own = [alpha for name, alpha in zip(streams, alphas, strict=True) if name == stream]
        always = set.intersection(*(set(alpha) for alpha in own))
        found[stream] = max(sorted(always), key=lambda route: sum(alpha[route] for alpha in own))
    return found


def _differences(by_way: dict[str, list[float]], one: str, other: str) -> list[float]:
    return [a - b for a, b in zip(by_way[one], by_way[other], strict=True)]


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stream", "requests", *WAYS, "routed − shared", title="livedraft bench routes: alpha, last third")
    for group, row in result["by_stream"].items():
        gain = row["gain"]
        shown = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
        table.add_row(group, str(row["requests"]), *(f"{row[name]:.3f}" for name in WAYS), shown)
    gain = result["gain"]
    whole = [f"{result[f'{name}_alpha']['mean']:.3f}" for name in WAYS]
    table.add_row("all", "", *whole, f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]")
    Console().print(table)
    print(
        f"updates: {result['updates']}; versions promoted: {result['versions_promoted']}; "
        f"routes opened: {', '.join(result['routes']) or 'none'}; router: {result['router_ms']} ms a request"
    )
    if not result["are_updates_equal"]:
        print("The two runs did not take the same number of updates; the comparison is not at equal work.")
