"""`livedraft bench routes`: several drafts against one, on a mixed stream of recorded requests.

The training process's own loop (`learning/team.py`) reruns the stream twice: with routing, and with one draft for everything.
Both take the same number of optimiser steps. Before a burst of requests reaches either, each of its requests is scored under
every draft in service, so over the last third of the stream five ways of choosing are compared on the same texts:
    routed      the draft that routing has given the request's stream
    shared      the one draft of the run without routing
    oracle      the best draft for each request, seen afterwards
    random      any of the routed run's drafts: their mean
    classifier  the draft of the request's own route wherever there is one, whatever the verdicts say

The router reads each prompt's text, in the order of the stream, as it does in a server.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
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
"""Optimiser steps that either run may take: one for every two new requests, and half as many on replayed ones alone."""
ROUTE_KINDS: tuple[RouteKind, ...] = ("system_prompt", "language", "topic")
"""What streams are told apart by where the settings do not say it."""
JUDGED_SHARE = 1 / 3
"""The last requests of the stream, that the figures are of."""


@dataclass(kw_only=True)
class Run:
    """Acceptance of each request, in order, under each route's draft at its arrival; and what the run came to."""

    alphas: list[dict[str, float]] = field(default_factory=list)
    routed_to: list[str] = field(default_factory=list)
    num_steps: int = 0
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
        shared = _rerun(traces, learner, replace(routing, enabled=False), Path(folder) / "shared", bar)
        routed = _rerun(traces, learner, routing, Path(folder) / "routed", bar)
    bar.stop()
    result = _figures(shared, routed, labels, [name for name, _, _ in stream], learning.seed)
    result |= {"model": model, "seed": learning.seed, "requests": len(stream), "router_ms": round(router_ms, 3)}
    print(json.dumps(result)) if as_json else _print(result)


def _labels(routing: RoutingConfig, prompts: Sequence[Sequence[Message]]) -> tuple[list[str], float]:
    """Each request's route, and what finding it takes, in milliseconds."""
    router = Router(routing, secret=b"bench")
    texts = [root_texts(messages) for messages in prompts]
    started = time.perf_counter()
    labels = [router.route_of(system, user, RouteHints()) for system, user in texts]
    return labels, 1000 * (time.perf_counter() - started) / len(prompts)


def _rerun(traces: Sequence[Trace], learner: Learner, routing: RoutingConfig, folder: Path, report: Report) -> Run:
    """As the training process would have it, burst by burst."""
    store, registry = TraceStore(folder), Registry(folder)
    registry.publish(lambda path: save_draft(learner.untrained, path), learner.version, status="in_service")
    team = Team(
        state=folder, target=learner.target, config=learner.config, routing=routing, max_positions=learner.max_positions
    )
    run = Run()
    first_judged = len(traces) - int(JUDGED_SHARE * len(traces))
    for first in range(0, len(traces), learner.burst):
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
        while team.num_steps < STEPS_PER_REQUEST * (first + len(burst)) and team.turn():
            for route in team.workers:
                serve_canaries(registry, route)
        kind = "with routes" if routing.enabled else "one draft"
        report(f"{kind}, {len(team.workers)} drafts", first + len(burst), len(traces))
    run.num_steps = team.num_steps
    run.opened = list(team.routing.open)
    return run


def _figures(shared: Run, routed: Run, labels: Sequence[str], groups: Sequence[str], seed: int) -> dict[str, Any]:
    judged = [i for i in range(len(groups)) if routed.alphas[i] and shared.alphas[i]]
    by_way: dict[str, list[float]] = {name: [] for name in ("routed", "shared", "oracle", "random", "classifier")}
    for i in judged:
        alphas = routed.alphas[i]
        by_way["routed"].append(alphas[routed.routed_to[i]])
        by_way["shared"].append(shared.alphas[i][DEFAULT_ROUTE])
        by_way["oracle"].append(max(alphas.values()))
        by_way["random"].append(sum(alphas.values()) / len(alphas))
        by_way["classifier"].append(alphas.get(labels[i], alphas[DEFAULT_ROUTE]))
    result: dict[str, Any] = {f"{name}_alpha": mean_with_bounds(values, seed) for name, values in by_way.items()}
    gains = [a - b for a, b in zip(by_way["routed"], by_way["shared"], strict=True)]
    result["gain"] = mean_with_bounds(gains, seed)
    result["by_stream"] = {}
    for group in dict.fromkeys(groups):
        places = [place for place, i in enumerate(judged) if groups[i] == group]
        if places:
            result["by_stream"][group] = {
                "requests": len(places),
                **{name: round(float(np.mean([values[p] for p in places])), 4) for name, values in by_way.items()},
                "gain": mean_with_bounds([gains[p] for p in places], seed),
            }
    result["updates"] = {"shared": shared.num_steps, "routed": routed.num_steps}
    result["routes"] = routed.opened
    return result


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("routed", "shared", "oracle", "random", "classifier")
    table = Table("stream", "requests", *names, "routed − shared", title="livedraft bench routes: alpha, last third")
    for group, row in result["by_stream"].items():
        gain = row["gain"]
        shown = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
        table.add_row(group, str(row["requests"]), *(f"{row[name]:.3f}" for name in names), shown)
    gain = result["gain"]
    whole = [f"{result[f'{name}_alpha']['mean']:.3f}" for name in names]
    table.add_row("all", "", *whole, f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]")
    Console().print(table)
    print(
        f"updates: {result['updates']}; routes opened: {', '.join(result['routes']) or 'none'}; "
        f"router: {result['router_ms']} ms a request"
    )
