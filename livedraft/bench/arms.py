"""The arms of `livedraft bench replay`: learners, and drafts that learn nothing, on recorded requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from livedraft.config import OSD_SETTINGS, DistillConfig, LearningConfig
from livedraft.drafts.database import DATABASE_NAME
from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import DraftWeights, load_draft, save_draft
from livedraft.learning.batches import Example, example_from_trace
from livedraft.learning.distill import DRAFT_NAME, Distillation
from livedraft.learning.forward import TargetParts
from livedraft.learning.store import TraceStore
from livedraft.learning.trainer import Trainer
from livedraft.learning.vocabulary import VocabularyUse
from livedraft.learning.worker import Worker
from livedraft.llm import LLM
from livedraft.models.pull import resolve_model
from livedraft.records import DEFAULT_ROUTE, DraftVersion, Trace, UserError

Report = Callable[[str, int, int], None]
"""Of progress: a text, how many are done, how many there are."""
OSD_INTERVAL = 8
"""Requests between two updates of the published algorithm (OSD, Algorithm 2)."""


@dataclass(kw_only=True)
class ArmResult:
    alphas: list[float] = field(default_factory=list)
    """Prequential, in the order of arrival."""
    versions: list[str] = field(default_factory=list)
    """That served each request."""
    num_promoted: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    train_flops: float = 0.0
    serve_flops: float | None = None
    tokens_per_second: float | None = None
    gate_alphas: dict[str, float] = field(default_factory=dict)
    """Of promoted versions, on what they had not trained on."""
    last_version: Path | None = None
    """The folder of the draft at the end, for `--arm static:FOLDER`; with --state only it outlives the run."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What every arm on recorded traffic needs."""

    target: Path
    untrained: DraftWeights
    version: DraftVersion
    """The untrained draft's description."""
    config: LearningConfig
    max_positions: int
    burst: int


def learner_of(llm: LLM, model: str, learning: LearningConfig, burst: int) -> Learner:
    weights, version = llm.untrained_draft()
    return Learner(
        target=resolve_model(model),
        untrained=weights,
        version=version,
        config=learning,
        max_positions=llm.engine.config.max_model_len,
        burst=burst,
    )


def run_arm(arm: str, traces: Sequence[Trace], learner: Learner, folder: Path, report: Report) -> ArmResult:
    started = time.perf_counter()
    if arm == "livedraft":
        result = _rerun_worker(traces, learner, folder, report)
    elif arm == "osd":
        result = _rerun_osd(traces, learner, report)
    elif arm.startswith("static:"):
        result = _score_static(arm.removeprefix("static:"), traces, learner, folder, report)
    else:
        raise UserError(f"There is no arm {arm!r}; take livedraft, osd, static:INIT, static:30% or static:FOLDER.")
    result.seconds = time.perf_counter() - started
    return result


def _rerun_worker(traces: Sequence[Trace], learner: Learner, folder: Path, report: Report) -> ArmResult:
    """The training process's own loop, in this process, burst by burst."""
    if (folder / DATABASE_NAME).exists():
        raise UserError(f"{folder} already holds traces; a learning curve starts in a fresh --state.")
    store, registry = TraceStore(folder), Registry(folder)
    registry.publish(lambda path: save_draft(learner.untrained, path), learner.version, status="in_service")
    worker = Worker(
        state=folder,
        target=learner.target,
        route=DEFAULT_ROUTE,
        config=replace(learner.config, micro_batch_tokens=1024),  # as live: nobody waits for the end of one
        max_positions=learner.max_positions,
    )
    for first in range(0, len(traces), learner.burst):
        serving = worker.in_service.id
        store.append([replace(trace, draft_version=serving) for trace in traces[first : first + learner.burst]])
        while worker.turn():
            serve_canaries(registry, DEFAULT_ROUTE)
        num_done = min(first + learner.burst, len(traces))
        report(f"livedraft, recorded requests, draft {worker.in_service.id}", num_done, len(traces))
    result = ArmResult()
    read_outcome(result, store.rows(), registry, worker.pacing.train_seconds, worker.trainer.flops)
    return result


def serve_canaries(registry: Registry, route: str) -> bool:
    """Live, a canary waits for a few requests; the watch is not what is measured here. Whether there was one."""
    canary = registry.canary(route)
    if canary is not None:
        registry.serve(canary.id, route, {})
    return canary is not None


def _rerun_osd(traces: Sequence[Trace], learner: Learner, report: Report) -> ArmResult:
    """OSD, Algorithm 2: the buffer holds the positions whose proposal was rejected; every OSD_INTERVAL requests the draft takes
    one step on it and it is emptied. No replay, no average, no falling rate, no gate."""
    config = replace(learner.config, **OSD_SETTINGS)
    trainer = _trainer(learner, config)
    chance = np.random.default_rng(config.seed)
    result = ArmResult()
    started = time.perf_counter()
    for first in range(0, len(traces), OSD_INTERVAL):
        examples = [
            example_from_trace(trace, first + index) for index, trace in enumerate(traces[first : first + OSD_INTERVAL])
        ]
        scores = trainer.score(examples)
        result.alphas += [score.alpha for score in scores]
        result.versions += [f"step {trainer.num_steps}"] * len(examples)
        buffer = []
        for example, score in zip(examples, scores, strict=True):
            is_rejected_T = chance.random(score.num_positions) > score.served_overlap_T
            if is_rejected_T.any():
                buffer.append(replace(example, loss_mask_T=is_rejected_T))
        if buffer:
            trainer.step(buffer)
        report("osd, recorded requests", first + len(examples), len(traces))
    result.train_seconds, result.train_flops = time.perf_counter() - started, trainer.flops
    return result


def _score_static(name: str, traces: Sequence[Trace], learner: Learner, folder: Path, report: Report) -> ArmResult:
    examples = [example_from_trace(trace, index) for index, trace in enumerate(traces)]
    result = ArmResult(versions=[name] * len(examples))
    if name == "INIT":
        weights = learner.untrained
    elif name.endswith("%"):
        started = time.perf_counter()
        weights, result.train_flops = _distilled(examples[: _count(name, len(examples))], learner, folder, report)
        result.train_seconds = time.perf_counter() - started
    else:
        weights = load_draft(Path(name) / DRAFT_NAME)
    result.alphas = [score.alpha for score in _trainer(learner, learner.config).score(examples, weights)]
    return result


def _count(share: str, num_requests: int) -> int:
    """Of "30%"."""
    try:
        percent = float(share.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0.0 < percent <= 100.0:
        raise UserError(f"static:{share} has no share; give a number above 0 and up to 100, as in static:30%.")
    return max(1, round(num_requests * percent / 100.0))


def _distilled(examples: list[Example], learner: Learner, folder: Path, report: Report) -> tuple[DraftWeights, float]:
    """As `livedraft distill --method distillspec` does it with its defaults; and the operations it took."""
    config = DistillConfig(method="distillspec", seed=learner.config.seed)
    trainer = _trainer(learner, config.learning)
    use = VocabularyUse(trainer.target.vocabulary_size)
    for example in examples:
        use.add(example)
    trainer.change_vocabulary(use.choose(config.learning.max_vocabulary_size))

    def say(run: str, figures: dict[str, Any], num_steps: int) -> None:
        report(f"distilling on {len(examples)} requests, steps", figures["step"], num_steps)

    made = Distillation(
        "static", folder / f"first-{len(examples)}", trainer, config, epochs=config.epochs, validation=examples[:1],
        progress=say,
    )  # fmt: skip
    weights = made.run(lambda _epoch, _draft: examples)
    return weights, trainer.flops


def _trainer(learner: Learner, config: LearningConfig) -> Trainer:
    return Trainer(
        config=config,
        target=TargetParts.load(learner.target, learner.untrained),
        draft=learner.untrained,
        max_positions=learner.max_positions,
    )


def read_outcome(
    result: ArmResult, rows: Sequence[Any], registry: Registry, train_seconds: float, train_flops: float
) -> None:
    result.alphas = [row.alpha for row in rows if row.alpha is not None]
    result.versions = [row.draft_version for row in rows]
    result.train_seconds, result.train_flops = train_seconds, train_flops
    serving = registry.in_service(DEFAULT_ROUTE)
    result.last_version = registry.folder(serving.id) if serving else None
    for row in registry.versions(DEFAULT_ROUTE):
        if row["decision"] and row["status"] in ("in_service", "retired"):
            result.num_promoted += 1
            result.gate_alphas[row["id"]] = row["decision"]["alpha"]
