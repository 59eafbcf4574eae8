"""`livedraft bench distill`: what selective distillation brings, and which loss, by fair experiment on recorded responses.

Each seed trains one DistillSpec draft for longer than needed and keeps it along the way; its state after `--epochs` is the
reference of all AdaSPEC runs of that seed, which start from the same initial draft. Three comparisons are read off those runs:

    equal steps            both after `--epochs`: the same batches, hence the same fresh tokens too
    equal FLOPs            AdaSPEC's, its reference and the passes of selection included, against DistillSpec trained on for
                           as many
    equal selected tokens  AdaSPEC after epochs / fraction, so that as many positions have taught (the paper's own setting)

Every difference is paired by validation request and averaged over the seeds, which differ in the order of the texts alone;
intervals are 95 %, by the bootstrap over requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from livedraft.bench.machine import run_record
from livedraft.bench.progress import Bar
from livedraft.config import LOSSES, DistillConfig, EngineConfig, SpeculationConfig
from livedraft.drafts.weights import DraftWeights, file_sha256, load_draft
from livedraft.learning.batches import Example, example_from_trace
from livedraft.learning.distill import (
    DRAFT_NAME,
    Distillation,
    Interval,
    rate_of,
    read_metrics,
    split,
    trainer_at_rate,
)
from livedraft.learning.forward import TargetParts
from livedraft.learning.selection import Selection
from livedraft.learning.store import read_recorded
from livedraft.learning.trainer import Trainer
from livedraft.learning.vocabulary import VocabularyUse
from livedraft.llm import LLM
from livedraft.models.pull import resolve_model
from livedraft.records import UserError

ARMS: tuple[tuple[str, float, bool], ...] = (
    ("top", 0.2, True), ("top", 0.4, True), ("top", 0.6, True), ("bottom", 0.4, True), ("random", 0.4, True),
    ("top", 0.4, False),
)  # fmt: skip
"""(what is kept, how much, whether the learning rate is multiplied by it). The last shows what of an arm's difference is the
rate's."""
PAPERS_ARM = ("top", 0.4, True)
"""The one that is also trained on, to equal selected tokens."""
_KEPT_AN_EPOCH = 3
_LONGER = 2.7
"""How much longer DistillSpec trains: beyond the FLOPs of an AdaSPEC run and its reference."""


@dataclass(kw_only=True)
class _Study:
    """What all runs share."""

    out: Path
    config: DistillConfig
    train: list[Example]
    validation: list[Example]
    target: TargetParts
    initial: DraftWeights
    max_positions: int

    def trainer(self, config: DistillConfig) -> Trainer:
        return Trainer(config=config.learning, target=self.target, draft=self.initial, max_positions=self.max_positions)

    def run(self, name: str, config: DistillConfig, epochs: int, selection: Selection | None = None) -> _Trained:
        trainer = self.trainer(config)
        if selection is not None:
            trainer = trainer_at_rate(trainer, rate_of(config))
        bar = Bar()

        def report(run: str, figures: dict[str, Any], num_steps: int) -> None:
            bar(f"{run}, steps, loss {figures['loss']:.3f}", figures["step"], num_steps)

        made = Distillation(
            name, self.out / name, trainer, config, epochs=epochs, validation=self.validation, selection=selection,
            progress=report,
        )  # fmt: skip
        made.run(lambda _epoch, _draft: self.train)
        bar.stop()
        return _Trained(run=made, rows=read_metrics(made.folder))


@dataclass(kw_only=True)
class _Trained:
    run: Distillation
    rows: list[dict[str, Any]]

    def flops_at(self, step: int) -> float:
        return float(self.rows[step - 1]["flops"])

    def step_of(self, flops: float) -> int:
        """The kept step nearest to that much work."""
        every = self.run.config.save_steps
        kept = range(every, len(self.rows) + 1, every)
        return min(kept, key=lambda step: abs(self.flops_at(step) - flops))

    def draft_at(self, step: int) -> DraftWeights:
        path = self.run.folder / f"step-{step:06d}.safetensors"
        return load_draft(path if path.exists() else self.run.folder / DRAFT_NAME)

    def alphas_at(self, step: int) -> list[float]:
        return self.run.alphas(self.draft_at(step))


def run(
    *,
    traces: Path,
    sampled_traces: Path | None,
    limit: int,
    seeds: Sequence[int],
    epochs: int,
    layers: int,
    losses: bool,
    out: Path,
    model: str,
    as_json: bool,
) -> None:
    _keep_arguments(out, traces, sampled_traces, limit=limit, epochs=epochs, layers=layers, model=model)
    study = _study(traces, limit, epochs, layers, out, model)
    result: dict[str, Any] = {
        "run": run_record(data=(traces,), seeds=seeds),
        "num_train": len(study.train), "num_validation": len(study.validation), "epochs": epochs, "seeds": list(seeds),
        "layers": layers, "selection": _selection(study, seeds, epochs),
    }  # fmt: skip
    if losses:
        result["losses"] = {"greedy responses": _losses(study, epochs, "greedy")}
        if sampled_traces is not None:
            sampled = _study(sampled_traces, limit, epochs, layers, out, model)
            result["losses"]["sampled responses"] = _losses(sampled, epochs, "sampled")
    print(json.dumps(result)) if as_json else _print(result)


def _keep_arguments(out: Path, traces: Path, sampled_traces: Path | None, **arguments: Any) -> None:
    """Raises UserError when the folder holds another study: its runs must not be taken for this one's."""
    try:
        ours = arguments | {
            f"{name}_sha256": None if path is None else file_sha256(path)
            for name, path in (("traces", traces), ("sampled_traces", sampled_traces))
        }
        out.mkdir(parents=True, exist_ok=True)
        path = out / "study.json"
        if not path.exists():
            path.write_text(json.dumps(ours, indent=2), encoding="utf-8")
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"The study could not be begun: {error}.") from error
    for name, value in ours.items():
        if theirs.get(name) != value and not (name == "sampled_traces_sha256" and None in (value, theirs.get(name))):
            raise UserError(
                f"{out} holds a study with {name} = {theirs.get(name)!r}, not {value!r}; give another --out."
            )


def _study(traces: Path, limit: int, epochs: int, layers: int, out: Path, model: str) -> _Study:
    recorded = read_recorded(traces)[:limit]
    examples = [example_from_trace(trace, number) for number, trace in enumerate(recorded)]
    config = DistillConfig(method="distillspec", epochs=epochs)
    train, validation = split(examples, config.validation_share)
    steps_an_epoch = -(-len(train) // config.batch_size)
    config = replace(config, save_steps=max(1, steps_an_epoch // _KEPT_AN_EPOCH), validate_steps=1_000_000)
    speculation = SpeculationConfig(num_draft_layers=layers)
    with LLM(model, dtype="float32", engine=EngineConfig(max_num_seqs=1), speculation=speculation) as llm:
        weights, _ = llm.untrained_draft()
        # bf16 or float32 change nothing in a fingerprint.
        if {trace.target_fingerprint for trace in recorded} != {llm.target_fingerprint}:
            raise UserError(f"{traces} was recorded with another target; name it with --model.")
    target = TargetParts.load(resolve_model(model), weights)
    longest = max(example.num_tokens for example in examples) + 1
    trainer = Trainer(config=config.learning, target=target, draft=weights, max_positions=longest)
    use = VocabularyUse(target.vocabulary_size)
    for example in train:
        use.add(example)
    trainer.change_vocabulary(use.choose(trainer.config.max_vocabulary_size))
    return _Study(
        out=out, config=config, train=train, validation=validation, target=target, initial=trainer.snapshot(),
        max_positions=longest,
    )  # fmt: skip


def _selection(study: _Study, seeds: Sequence[int], epochs: int) -> dict[str, Any]:
    alphas_of: dict[str, list[list[float]]] = {}
    differences: dict[str, dict[str, list[list[float]]]] = {}
    baseline: list[list[float]] = []
    for seed in seeds:
        config = replace(study.config, seed=seed)
        spec = study.run(f"seed-{seed}-distillspec", config, int(epochs * _LONGER) + 1)
        last = len(spec.rows) // (int(epochs * _LONGER) + 1) * epochs
        ours = spec.alphas_at(last)
        baseline.append(ours)
        for keep, fraction, is_rescaled in ARMS:
            name = f"{keep} {fraction}" + ("" if is_rescaled else ", full rate")
            selection = Selection(reference=spec.draft_at(last), fraction=fraction, keep=keep)  # type: ignore[arg-type]  # of ARMS
            num_epochs = round(epochs / fraction) if (keep, fraction, is_rescaled) == PAPERS_ARM else epochs
            arm_config = replace(config, select_fraction=fraction, rescale_rate=is_rescaled)
            folder = f"seed-{seed}-{keep}-{fraction}" + ("" if is_rescaled else "-full-rate")
            arm = study.run(folder, arm_config, num_epochs, selection)
            work = spec.flops_at(last) + arm.flops_at(last)
            alphas = arm.alphas_at(last)
            compared = {
                "equal steps": (alphas, ours),
                "equal FLOPs": (alphas, spec.alphas_at(spec.step_of(work))),
            }
            if num_epochs > epochs:
                last_draft = load_draft(arm.run.folder / DRAFT_NAME)
                compared["equal selected tokens"] = (arm.run.alphas(last_draft), ours)
            alphas_of.setdefault(name, []).append(alphas)
            for kind, (one, other) in compared.items():
                found = differences.setdefault(name, {}).setdefault(kind, [])
                found.append([a - b for a, b in zip(one, other, strict=True)])
    return {
        "distillspec": {"alpha": _over_seeds(baseline)},
        **{
            name: {"alpha": _over_seeds(alphas_of[name])} | {kind: _over_seeds(found) for kind, found in kinds.items()}
            for name, kinds in differences.items()
        },
    }


def _over_seeds(by_seed: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean over seeds of each request, then the interval over requests."""
    return Interval.of([sum(values) / len(values) for values in zip(*by_seed, strict=True)]).rounded()


def _losses(study: _Study, epochs: int, kind: str) -> dict[str, Any]:
    """One seed of each loss; alpha and how well the drafts fit at the temperature of the responses."""
    result = {}
    for loss in LOSSES:
        config = replace(study.config, loss=loss)
        try:
            trained = study.run(f"{kind}-{loss}", config, epochs)
        except UserError as error:
            result[loss] = {"failed": str(error)}
            continue
        scores = trained.run.scores(load_draft(trained.run.folder / DRAFT_NAME))
        result[loss] = {
            "alpha": Interval.of([score.alpha for score in scores]).rounded(),
            "argmax_match": Interval.of([score.alpha_t0 for score in scores]).rounded(),
        }
    return result


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    kinds = ("equal steps", "equal FLOPs", "equal selected tokens")
    table = Table("draft", "alpha", *(f"minus DistillSpec, {kind}" for kind in kinds))
    for name, figures in result["selection"].items():
        table.add_row(name, _shown(figures["alpha"]), *(_shown(figures.get(kind), "+") for kind in kinds))
    console = Console()
    console.print(table)
    for kind, losses in result.get("losses", {}).items():
        own = Table("loss", "alpha", "argmax match", title=kind)
        for loss, figures in losses.items():
            own.add_row(loss, *(_shown(figures.get(name)) for name in ("alpha", "argmax_match")))
        console.print(own)


def _shown(figure: dict[str, float] | None, sign: str = "") -> str:
    if figure is None:
        return "–"
    return f"{figure['mean']:{sign}.3f} [{figure['low']:{sign}.3f}, {figure['high']:{sign}.3f}]"
