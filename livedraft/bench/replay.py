"""`livedraft bench replay`: prompt files through the real engine and the real trainer, and other learners on the same traffic.

The target's output does not depend on the draft. So once served requests are recorded, any arm can be rerun on them:
    livedraft       the loop of this project: score, train, replay, gate (the training process's own `Worker`)
    osd             Online Speculative Decoding as published: rejected positions only, an update every 8 requests, no replay
    static:INIT     the untrained draft, never changed
    static:DIR      a version's folder, never changed
    static:30%      distilled offline on the first 30 % of the requests (three passes, DistillSpec), never changed after

Requests come in bursts of `--concurrency`; between bursts the trainer finishes what it has, so the curve is one of requests and
not of seconds, and the live arm and its recorded rerun agree. Alpha is prequential: scored with the version that served it.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from livedraft.bench.arms import ArmResult, Learner, Report, learner_of, read_outcome, run_arm
from livedraft.bench.machine import run_record
from livedraft.bench.outputs import check_outputs
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts
from livedraft.config import EngineConfig, LearningConfig, RoutingConfig
from livedraft.device import num_available_cores
from livedraft.drafts.database import DATABASE_NAME, read_status
from livedraft.drafts.registry import Registry
from livedraft.learning.store import TraceStore, read_recorded, write_shard
from livedraft.llm import LLM
from livedraft.records import DEFAULT_ROUTE, SamplingParams, Trace, UserError
from livedraft.tokenizer import Message

T = TypeVar("T")
_LONGEST_SETTLE_SECONDS = 120.0
_LOOK_AT_REQUEST = 120


def run(
    *,
    prompt_files: list[Path],
    limit: int,
    shift: bool,
    mix: bool,
    arms: list[str],
    concurrency: int,
    max_tokens: int,
    temperature: float,
    save_traces: Path | None,
    from_traces: list[Path],
    plot: Path | None,
    state: Path | None,
    model: str,
    dtype: str,
    learning: LearningConfig,
    as_json: bool,
) -> None:
    check_outputs(files=(save_traces,), plot=plot)
    bar = Bar()
    results: dict[str, ArmResult] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not from_traces:
            prompts = _ordered(
                {path.stem: read_prompts(path, 2 * limit if shift else limit) for path in prompt_files},
                limit, shift=shift, mix=mix, seed=learning.seed,
            )  # fmt: skip
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
            if "livedraft" in arms:
                live_state = state or Path(folder) / "live"
                if (live_state / DATABASE_NAME).exists():
                    raise UserError(f"{live_state} already holds traces; a learning curve starts in a fresh --state.")
                results["livedraft"], traces, learner = _serve_live(
                    prompts, sampling, live_state, concurrency, model, dtype, learning, bar
                )
                arms = [arm for arm in arms if arm != "livedraft"]
            else:
                traces, learner = record(prompts, sampling, concurrency, model, dtype, learning, bar)
        else:
            recorded = {path.stem: read_recorded(path) for path in from_traces}
            ordered = _ordered(recorded, limit, shift=shift, mix=mix, seed=learning.seed)
            traces = [trace for _, trace in ordered]
            if len(recorded) > 1:
                traces = [replace(trace, request_id=f"{name}#{n}") for n, (name, trace) in enumerate(ordered)]
            learner = _learner(model, dtype, learning, concurrency)
        if save_traces is not None:
            write_shard(save_traces, traces)
        _check_target(traces, learner)
        for arm in arms:
            bar(f"{arm}, recorded requests", 0, len(traces))
            results[arm] = run_arm(arm, traces, learner, (state or Path(folder)) / f"arm-{arm.partition(':')[0]}", bar)
        for result in results.values():
            result.last_version = result.last_version if state is not None else None
        fields = {arm: _fields(result, traces) for arm, result in results.items()}
    bar.stop()
    if plot is not None:
        from livedraft.bench.plots import plot_curves

        plot_curves({arm: result.alphas for arm, result in results.items()}, plot)
    first = next(iter(fields.values()))
    about = run_record(data=from_traces or prompt_files, seeds=(learning.seed,))
    output = {"run": about, "model": model, "seed": learning.seed, "requests": len(traces), **first, "arms": fields}
    if as_json:
        print(json.dumps(output))
    else:
        _print_table(fields)


# --- the traffic ----------------------------------------------------------------------------------------------------


def _ordered(
    by_file: Mapping[str, Sequence[T]], limit: int, *, shift: bool, mix: bool, seed: int
) -> list[tuple[str, T]]:
    """(segment, prompt or trace) in order: one file after the other, with `shift` the first one's next ones again at the end,
    or all of them mixed."""
    if not by_file:
        raise UserError("bench replay needs --prompts FILE, or --from-traces FILE.")
    segments = [(name, items[:limit]) for name, items in by_file.items()]
    if shift:
        first, items = next(iter(by_file.items()))
        returned = items[limit : 2 * limit]
        if not returned:
            raise UserError(f"--shift returns to {first} at the end, but it has no more than {limit} entries.")
        segments.append((f"{first} again", returned))
    ordered = [(name, item) for name, items in segments for item in items]
    if mix:
        random.Random(seed).shuffle(ordered)
    return ordered


def _check_target(traces: Sequence[Trace], learner: Learner) -> None:
    if not traces:
        raise UserError("There is no recorded request.")
    for trace in traces:
        if trace.target_fingerprint != learner.version.target_fingerprint:
            raise UserError(
                f"The traces were recorded with another target ({trace.target_fingerprint}); name it with --model."
            )


# --- the live arm ---------------------------------------------------------------------------------------------------


def _serve_live(
    prompts: list[tuple[str, list[Message]]],
    sampling: SamplingParams,
    state: Path,
    concurrency: int,
    model: str,
    dtype: str,
    learning: LearningConfig,
    report: Report,
) -> tuple[ArmResult, list[Trace], Learner]:
    config = EngineConfig(max_num_seqs=concurrency)
    # Bursts and pauses: while the trainer works nobody is served, so it may have the whole machine.
    learning = replace(learning, level="on", num_threads=num_available_cores(), micro_batch_tokens=1024)
    result = ArmResult()
    one_draft = RoutingConfig(enabled=False)  # what `bench routes` is for
    with LLM(model, state=state, learn=True, dtype=dtype, engine=config, learning=learning, routing=one_draft) as llm:
        learner = learner_of(llm, model, learning, concurrency)
        store, registry = TraceStore(state), Registry(state)
        num_tokens, started, serve_seconds = 0, time.perf_counter(), 0.0
        for first in range(0, len(prompts), concurrency):
            burst = prompts[first : first + concurrency]
            requests = [
                llm.request(messages, sampling, id=f"{name}#{first + index}")
                for index, (name, messages) in enumerate(burst)
            ]
            burst_started = time.perf_counter()
            states = llm.add(requests)
            llm.run()
            serve_seconds += time.perf_counter() - burst_started
            num_tokens += sum(one.num_output_tokens for one in states)
            _settle(llm, store, registry, first + len(burst))
            report(f"live requests, draft {llm.engine.draft_version}", first + len(burst), len(prompts))
        result.seconds = time.perf_counter() - started
        result.tokens_per_second = num_tokens / serve_seconds
        result.serve_flops = llm.serve_flops
        status = read_status(state, "trainer")
        rows = store.rows()
        read_outcome(result, rows, registry, status["train_seconds"], status["train_flops"])
        traces = [trace for row in rows if (trace := store.read(row)) is not None]
    return result, traces, learner


def record(
    prompts: list[tuple[str, list[Message]]],
    sampling: SamplingParams,
    concurrency: int,
    model: str,
    dtype: str,
    learning: LearningConfig,
    report: Report,
) -> tuple[list[Trace], Learner]:
    """Served plainly, nothing learnt: the target's verdicts are the same, and nobody waits for a trainer."""
    found: dict[str, Trace] = {}
    with LLM(model, dtype=dtype, engine=EngineConfig(max_num_seqs=concurrency)) as llm:
        learner = learner_of(llm, model, learning, concurrency)
        llm.engine.offer_draft(None)
        llm.engine.trace_sink = lambda trace: found.update({trace.request_id: trace})
        requests = [
            llm.request(messages, sampling, id=f"{name}#{index}") for index, (name, messages) in enumerate(prompts)
        ]
        llm.add(requests)
        llm.run(after_round=lambda: report("recorded requests", len(found), len(requests)))
    return [found[request.id] for request in requests], learner


def _settle(llm: LLM, store: TraceStore, registry: Registry, num_requests: int) -> None:
    """The trainer has scored, trained and tested all it can, and what it promoted is in service."""
    assert llm.state is not None
    deadline = time.monotonic() + _LONGEST_SETTLE_SECONDS
    while time.monotonic() < deadline:
        last = store.rows(after_id=num_requests - 1)
        is_scored = bool(last) and last[-1].alpha is not None
        if is_scored and read_status(llm.state, "trainer").get("status") == "waiting for traces":
            serving = registry.in_service(DEFAULT_ROUTE)
            llm.engine.take_up_offered_draft()
            is_seen = registry.canary(DEFAULT_ROUTE) is None or llm.engine.drafting.second is not None
            if serving is not None and serving.id == llm.engine.draft_version and is_seen:
                return
        time.sleep(0.02)
    raise UserError(
        f"The trainer did not keep up within {_LONGEST_SETTLE_SECONDS:.0f} s; see trainer.log in the state folder."
    )


def _learner(model: str, dtype: str, learning: LearningConfig, burst: int) -> Learner:
    with LLM(model, dtype=dtype, engine=EngineConfig(max_num_seqs=1, num_prefix_slots=0)) as llm:
        return learner_of(llm, model, learning, burst)


# --- the report -----------------------------------------------------------------------------------------------------


def _fields(result: ArmResult, traces: Sequence[Trace]) -> dict[str, Any]:
    alphas = result.alphas
    segments: dict[str, list[float]] = {}
    for trace, alpha in zip(traces, alphas, strict=True):
        segments.setdefault(trace.request_id.split("#")[0], []).append(alpha)
    version = result.versions[min(_LOOK_AT_REQUEST, len(alphas)) - 1]
    return {
        "requests": len(alphas),
        "alpha_by_100": _means(alphas, 100),
        "alpha_window_50": _means(alphas, 50),
        "alpha_first_100": _mean(alphas[:100]),
        "alpha_last_100": _mean(alphas[-100:]),
        f"alpha_of_version_at_{_LOOK_AT_REQUEST}": result.gate_alphas.get(version),
        "versions_promoted": result.num_promoted,
        "last_version": str(result.last_version) if result.last_version else None,
        "tokens_per_second": result.tokens_per_second and round(result.tokens_per_second, 1),
        "seconds": round(result.seconds, 1),
        "train_seconds": round(result.train_seconds, 1),
        "train_flops": result.train_flops,
        "serve_flops": result.serve_flops,
        "segments": [
            {
                "name": name,
                "requests": len(values),
                "alpha_first_100": _mean(values[:100]),
                "alpha_last_100": _mean(values[-100:]),
            }
            for name, values in segments.items()
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _means(values: Sequence[float], size: int) -> list[float]:
    return [_mean(values[start : start + size]) for start in range(0, len(values), size)]


def _print_table(fields: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("alpha_first_100", "alpha_last_100", "versions_promoted", "train_seconds", "seconds")
    table = Table("arm", *names, title="livedraft bench replay")
    for arm, row in fields.items():
        table.add_row(arm, *(str(row[name]) for name in names))
    Console().print(table)
