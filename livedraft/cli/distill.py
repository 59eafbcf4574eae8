"""`livedraft distill`: prompts in, a distilled draft out. The run's folder holds everything it needs to go on after a kill:

run.json          the settings; a run with others is refused
responses/        what the drafts learn from, with the target's verdicts
distillspec/      the first draft, AdaSPEC's reference: draft.safetensors, manifest.json, metrics.jsonl
adaspec/          the second one
tensorboard/      curves of both
result.json       alpha on the prompts kept back, of the initial draft and of both
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from livedraft.bench.machine import run_record
from livedraft.bench.prompts import Row, as_prompt, read_rows
from livedraft.bench.reference import transformers_model
from livedraft.cli.distill_screen import Screen
from livedraft.config import DistillConfig, DistillRunConfig, EngineConfig, SpeculationConfig
from livedraft.device import choose_execution_path, num_available_cores, versions
from livedraft.draft_source import UNTRAINED, tokenizer_of
from livedraft.drafts.registry import MANIFEST_NAME
from livedraft.drafts.weights import DraftWeights, check_against_target, file_sha256
from livedraft.engine.judging import judged_trace
from livedraft.learning import finetune
from livedraft.learning.batches import Example, example_from_trace, sha256_of_texts
from livedraft.learning.distill import (
    DRAFT_NAME,
    METRICS_NAME,
    Distillation,
    Interval,
    is_validation,
    rate_of,
    read_metrics,
    selection_of,
    split,
    trainer_at_rate,
)
from livedraft.learning.forward import TargetParts
from livedraft.learning.ranks import Ranks
from livedraft.learning.store import read_recorded, write_shard
from livedraft.learning.teacher import FullTeacher, Writer
from livedraft.learning.trainer import Trainer, require_memory
from livedraft.learning.vocabulary import VocabularyUse
from livedraft.llm import LLM
from livedraft.models.open import open_model
from livedraft.models.pull import is_hub_name, pull, resolve_model
from livedraft.records import DraftVersion, Request, SamplingParams, Trace, UserError
from livedraft.tokenizer import Tokenizer

_PART = 64
"""Responses a file: what a kill costs at most."""


@dataclass(kw_only=True)
class _Run:
    """What every stage needs."""

    settings: DistillRunConfig
    config: DistillConfig
    out: Path
    llm: LLM
    target: Path
    ranks: Ranks
    screen: Screen
    rows: list[Row]
    """Prompts; empty where responses were recorded before."""


def run(settings: DistillRunConfig, config: DistillConfig, *, use_wandb: bool, as_json: bool) -> None:
    ranks = Ranks.from_environment()
    out = Path(settings.out)
    if settings.reference is not None and not (Path(settings.reference) / DRAFT_NAME).exists():
        raise UserError(f"There is no draft in {settings.reference}; --reference names the folder of a distilled one.")
    target = resolve_model(_fetched(settings.target))
    rows = [] if settings.prompts is None else read_rows(settings.prompts, settings.limit)
    _keep_settings(out, settings, config, ranks)
    if settings.finetune_target is not None:
        target = _finetuned(target, settings, config, out, ranks)
    draft = UNTRAINED if settings.draft == "auto" else str(_fetched(settings.draft))
    threads = settings.threads or max(1, num_available_cores() // ranks.size)
    with (
        LLM(
            str(target),
            draft=draft,
            dtype=settings.dtype,
            num_threads=threads,
            engine=EngineConfig(max_num_seqs=settings.concurrency),
            speculation=SpeculationConfig(num_draft_layers=settings.draft_layers),
        ) as llm,
        Screen(out, use_wandb=use_wandb, is_shown=ranks.is_first and not as_json, writes=ranks.is_first) as screen,
    ):
        stage = _Run(
            settings=settings, config=config, out=out, llm=llm, target=target, ranks=ranks, screen=screen, rows=rows
        )
        data = settings.traces or settings.prompts
        assert data is not None  # the settings have seen to it
        about = run_record(data=(data,), seeds=(config.seed,)) | {"settings": _unusual(settings, config)}
        result = {"run": about} | _distil(stage, draft)
    if ranks.is_first:
        (out / "result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        print(json.dumps(result)) if as_json else _print(result)


def _distil(run: _Run, draft: str) -> dict[str, Any]:
    """1. responses; 2. the initial draft; 3. DistillSpec; 4. AdaSPEC; 5. alpha of all on what was kept back."""
    config = run.config
    traces = _responses(run)
    train, validation = split([example_from_trace(t, n) for n, t in enumerate(traces)], config.validation_share)
    trainer = _trainer(run, draft, train, validation)
    initial = trainer.snapshot()
    responses = _texts_of(run, train, initial)
    results: dict[str, DraftWeights] = {"initial": initial}
    folders: dict[str, Path] = {}
    if run.settings.reference is not None:
        results["distillspec"] = run.llm.draft_weights(run.settings.reference)  # of this target, or an error
        config_of_target = getattr(run.llm.target, "config", None)
        check_against_target(
            results["distillspec"], config_of_target, run.settings.reference, run.llm.target.vocabulary_size
        )
    else:
        spec = Distillation(
            "distillspec", run.out / "distillspec", trainer, config, validation=validation, progress=run.screen.step,
            epochs=config.epochs if config.method == "distillspec" else config.reference_epochs or config.epochs,
        )  # fmt: skip
        results["distillspec"], folders["distillspec"] = spec.run(responses("distillspec")), spec.folder
    if config.method == "adaspec":
        again = trainer_at_rate(trainer, rate_of(config))
        again.restart_from(initial)
        again.flops = 0.0
        ada = Distillation(
            "adaspec", run.out / "adaspec", again, config, validation=validation, progress=run.screen.step,
            epochs=config.epochs, selection=selection_of(results["distillspec"], config),
        )  # fmt: skip
        results["adaspec"], folders["adaspec"] = ada.run(responses("adaspec")), ada.folder
    judge = Distillation("", run.out, trainer, config, epochs=1, validation=validation)
    figures: dict[str, Any] = {"num_train": len(train), "num_validation": len(validation)}
    for name in ("initial", "distillspec", "adaspec"):
        scores = judge.scores(results[name]) if name in results else []
        figures[f"{name}_alpha"] = Interval.of([one.alpha for one in scores]).rounded() if scores else None
        figures[f"{name}_argmax_match"] = Interval.of([one.alpha_t0 for one in scores]).rounded() if scores else None
    if config.method == "adaspec":
        pairs = zip(judge.scores(results["adaspec"]), judge.scores(results["distillspec"]), strict=True)
        figures["adaspec_minus_distillspec"] = Interval.of([a.alpha - d.alpha for a, d in pairs]).rounded()
    if run.ranks.is_first:
        for name, folder in folders.items():
            _describe(run, folder, results[name], figures[f"{name}_alpha"], train)
            last = read_metrics(folder)[-1]
            figures[f"{name}_training"] = {key: last[key] for key in ("step", "num_tokens", "flops", "seconds")}
            figures[f"{name}_draft"] = str(folder)
        if len(folders) == 2:  # an AdaSPEC draft has cost its reference too
            both = [figures[f"{name}_training"]["flops"] for name in folders]
            figures["adaspec_training"]["flops_with_reference"] = sum(both)
    return figures


# --- responses --------------------------------------------------------------------------------------------------------


def _responses(run: _Run) -> list[Trace]:
    """Recorded before, given, or generated by the target now; the same in every process."""
    if run.settings.traces is not None:
        source = Path(run.settings.traces)
        files = sorted(source.glob("part-*.st")) if source.is_dir() else [source]
        traces = [trace for file in files for trace in read_recorded(file)][: run.settings.limit]
        return _of_this_target(run, traces, source)
    rows = _that_fit(run)
    folder = run.out / "responses"
    if run.ranks.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        make = _given if run.settings.responses == "given" else _generated
        for first in range(0, len(rows), _PART):
            path = _part(folder, first)
            if not path.exists():
                _write(path, make(run, rows[first : first + _PART], first))
            run.screen.responses(min(first + _PART, len(rows)), len(rows))
    run.ranks.wait()
    traces = [trace for first in range(0, len(rows), _PART) for trace in read_recorded(_part(folder, first))]
    return _of_this_target(run, traces, folder)


def _of_this_target(run: _Run, traces: list[Trace], source: Path) -> list[Trace]:
    if not traces:
        raise UserError(f"{source} holds no response.")
    for trace in traces:
        if trace.target_fingerprint != run.llm.target_fingerprint:
            raise UserError(f"{source} was recorded with another target; name it with --target, or give another --out.")
    return traces


def _that_fit(run: _Run) -> list[Row]:
    """Without the prompts that leave no room for an answer; how many they are is said."""
    most = run.llm.engine.config.max_model_len - run.config.max_tokens
    fit = [row for row in run.rows if len(_prompt_ids(run.llm.tokenizer, row)) <= most]
    if len(fit) < len(run.rows) and run.ranks.is_first:
        print(f"{len(run.rows) - len(fit)} prompts have more than {most} tokens and are left out.", file=sys.stderr)
    return fit


def _part(folder: Path, first: int) -> Path:
    return folder / f"part-{first:07d}.st"


def _write(path: Path, traces: Sequence[Trace]) -> None:
    part = path.with_suffix(".part")
    try:
        write_shard(part, traces)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} could not be written ({error}).") from error


def _prompt_ids(tokenizer: Tokenizer, row: Row) -> list[int]:
    prompt = as_prompt(tokenizer, row)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)


def _sampling(config: DistillConfig, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature, max_tokens=config.max_tokens, seed=seed if config.temperature > 0 else None
    )


def _generated(run: _Run, rows: Sequence[Row], first: int) -> list[Trace]:
    """By the engine, many together, speculatively where the draft is one that may be right; the verdicts come with serving."""
    found: dict[str, Trace] = {}
    llm = run.llm
    if run.settings.draft == "auto":  # the target's bare layers hardly ever are
        llm.engine.offer_draft(None)
    llm.engine.trace_sink = lambda trace: found.update({trace.request_id: trace})
    requests = [
        llm.request(
            as_prompt(llm.tokenizer, row), _sampling(run.config, run.config.seed + first + index), id=str(first + index)
        )
        for index, row in enumerate(rows)
    ]
    llm.add(requests)
    llm.run()
    llm.engine.trace_sink = None
    return [found[request.id] for request in requests]


def _given(run: _Run, rows: Sequence[Row], first: int) -> list[Trace]:
    llm = run.llm
    traces = []
    for index, row in enumerate(rows):
        response = _response_of(row, first + index + 1)
        request = llm.request(as_prompt(llm.tokenizer, row), _sampling(run.config, 0), id=str(first + index))
        output = [*llm.tokenizer.encode_text(response)[: run.config.max_tokens - 1], llm.tokenizer.eos_token_ids[0]]
        output = output[: llm.target.max_length - len(request.prompt_token_ids)]
        traces.append(judged_trace(llm.target, request, output, llm.target_fingerprint))
    return traces


def _texts_of(run: _Run, train: list[Example], initial: DraftWeights) -> Callable[[str], Callable[..., list[Example]]]:
    """For a run, what each of its epochs trains on: the target's texts, or texts that the draft has a part in."""
    if run.config.source == "target":
        return lambda _name: lambda _epoch, _draft: train

    def of_run(name: str) -> Callable[[int, DraftWeights], list[Example]]:
        def of_epoch(epoch: int, draft: DraftWeights) -> list[Example]:
            # On disk: after a kill in mid-epoch the draft that wrote them is no more.
            path = run.out / name / f"texts-{epoch:03d}.st"
            if run.ranks.is_first and not path.exists():
                _write(path, _mixed(run, train, draft, epoch))
            run.ranks.wait()
            return [example_from_trace(trace, number) for number, trace in enumerate(read_recorded(path))]

        return of_epoch

    return of_run


def _mixed(run: _Run, train: Sequence[Example], draft: DraftWeights, epoch: int) -> list[Trace]:
    config, target = run.config, run.llm.target
    resident = run.llm.laid_out(draft, f"epoch-{epoch}")
    writer = Writer(resident.decoder, draft.draft_to_target_W, target, run.llm.tokenizer.eos_token_ids)
    seed = (config.seed * 1_000 + epoch) * 1_000_000
    sampling = _sampling(config, 0)
    is_drafts = share_of_draft(config, seed)
    prompts = [example.token_ids[: example.num_prompt_tokens].tolist() for example in train]
    outputs = writer.write(prompts, sampling, is_drafts, seed=seed)
    return [
        judged_trace(
            target,
            Request(id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling),
            output,
            run.llm.target_fingerprint,
        )
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def share_of_draft(config: DistillConfig, seed: int) -> Callable[[int, int], bool]:
    """(prompt, position) to whether the draft writes that token."""
    from livedraft.sampling import ACCEPT, uniform

    if config.source == "student":
        return lambda _prompt, _position: True
    if config.mix_level == "request":
        return lambda prompt, _position: uniform(seed + prompt, 0, ACCEPT) < config.student_share
    return lambda prompt, position: uniform(seed + prompt, position, ACCEPT) < config.student_share


# --- the trainer and what it leaves -----------------------------------------------------------------------------------


def _trainer(run: _Run, draft: str, train: Sequence[Example], validation: Sequence[Example]) -> Trainer:
    weights = run.llm.draft_weights(draft)
    parts = TargetParts.load(run.target, weights)
    learning = replace(run.config.learning, max_vocabulary_size=run.settings.max_vocabulary_size)
    require_memory(weights, learning)
    trainer = Trainer(
        config=learning, target=parts, draft=weights, ranks=run.ranks,
        max_positions=max(one.num_tokens for one in (*train, *validation)) + run.config.max_tokens + 1,
        teacher=FullTeacher(run.llm.target) if run.config.teacher == "full" else None,
    )  # fmt: skip
    if run.settings.dtype == "float32":
        trainer.uses_bf16 = False
    if draft == UNTRAINED:  # its head follows what is to be learnt
        use = VocabularyUse(parts.vocabulary_size)
        for example in train:
            use.add(example)
        trainer.change_vocabulary(use.choose(run.settings.max_vocabulary_size))
    return trainer


def _describe(run: _Run, folder: Path, draft: DraftWeights, alpha: dict[str, float], train: Sequence[Example]) -> None:
    """The manifest that `serve --draft` and `drafts import` check, and a card with where the draft comes from."""
    sha256 = file_sha256(folder / DRAFT_NAME)
    version = DraftVersion(
        id=folder.name, route="default", parent=None, sha256=sha256, num_layers=draft.num_layers, created_at=time.time(),
        target_fingerprint=run.llm.target_fingerprint, tokenizer_fingerprint=run.llm.tokenizer.fingerprint,
        vocabulary_size=draft.vocabulary_size, num_requests_seen=len(train), alpha=alpha["mean"],
        data_sha256=sha256_of_texts([*one.token_ids, one.output_token_ids[-1]] for one in train),
    )  # fmt: skip
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(version), indent=2), encoding="utf-8")
    settings = json.loads((run.out / "run.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(
        f"# A draft for {run.target.stem}, distilled by livedraft ({folder.name})\n\n"
        f"- alpha {alpha['mean']} [{alpha['low']}, {alpha['high']}] on prompts kept back, {len(train)} to learn from\n"
        f"- sha256 of {DRAFT_NAME}: {sha256}\n- target fingerprint {version.target_fingerprint}, tokenizer fingerprint "
        f"{version.tokenizer_fingerprint}\n- command: `{' '.join(sys.argv)}`\n- every step: {METRICS_NAME}\n"
        f"- versions: {', '.join(f'{name} {number}' for name, number in versions().items())}\n"
        f"- sha256 of what it learnt from, prompts and the target's responses as token ids: {version.data_sha256}\n\n"
        f"Settings:\n\n```json\n{json.dumps(settings, indent=2)}\n```\n",
        encoding="utf-8",
    )


def _finetuned(target: Path, settings: DistillRunConfig, config: DistillConfig, out: Path, ranks: Ranks) -> Path:
    """Trained once, kept as a Hugging Face folder in the run's own."""
    folder = out / "target"
    if ranks.is_first and not (folder / "config.json").exists():
        assert settings.finetune_target is not None
        rows = read_rows(settings.finetune_target, settings.limit)
        opened = open_model(target, choose_execution_path("float32", "cpu"))
        tokenizer = tokenizer_of(target, opened)
        texts = []
        for number, row in enumerate(rows, start=1):
            prompt_ids = _prompt_ids(tokenizer, row)
            if is_validation(prompt_ids, config.validation_share):
                continue  # what drafts are measured on the target has not been fitted to either
            response_ids = tokenizer.encode_text(_response_of(row, number))
            texts.append((prompt_ids, [*response_ids, tokenizer.eos_token_ids[0]]))
        model = opened.hf_model
        if opened.native is not None:
            model = transformers_model(opened.native.tensors, opened.native.config, torch.float32)
        finetune.finetune(
            model, texts, epochs=settings.finetune_epochs, learning_rate=settings.finetune_learning_rate, seed=config.seed,
            report=_finetuning,
        )  # fmt: skip
        finetune.save(model, tokenizer.hf_tokenizer, folder)
    ranks.wait()
    return folder


def _finetuning(step: int, num_steps: int, loss: float) -> None:
    print(f"\rfine-tuning the target, step {step} of {num_steps}, loss {loss:.3f}  ", end="", file=sys.stderr)


def _response_of(row: Row, number: int) -> str:
    if row.response is None:
        raise UserError(f"Prompt {number} has no `response` to learn from.")
    return row.response


def _fetched(name: str) -> str:
    """Models of the hub are fetched; anything else is as it stands."""
    return str(pull(name)) if is_hub_name(name) else name


def _keep_settings(out: Path, settings: DistillRunConfig, config: DistillConfig, ranks: Ranks) -> None:
    """Raises UserError when the folder holds a run with other settings, or cannot be written."""
    ours: dict[str, Any] = asdict(settings) | asdict(config)
    for name in ("prompts", "traces"):
        if ours[name] is not None and Path(ours[name]).is_file():
            ours[f"{name}_sha256"] = file_sha256(Path(ours[name]))
    for name in ("out", "threads", "concurrency"):  # change no number
        del ours[name]
    ours["processes"] = ranks.size  # AdaSPEC selects within each one's share of a batch
    path = out / "run.json"
    if path.exists():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise UserError(
                    f"{out} holds a run with {name} = {theirs.get(name)!r}, this one has {value!r}; give another --out."
                )
    elif ranks.is_first:
        try:
            out.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(ours, indent=2), encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise UserError(f"{out} cannot be written ({error.strerror}); give another --out.") from error
    ranks.wait()


def _unusual(settings: DistillRunConfig, config: DistillConfig) -> dict[str, Any]:
    """Settings that make a draft another one than the defaults would."""
    kept = {"draft_layers", "responses"}  # of the run's, which are mostly files
    aside = {"method", "seed", "validate_steps", "checkpoint_steps", "save_steps", "micro_batch_tokens"}
    return {
        field.name: value
        for one in (settings, config)
        for field in fields(one)
        if (value := getattr(one, field.name)) != field.default
        and (field.name in kept if one is settings else field.name not in aside)
    }


# --- what is shown ----------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("draft", "alpha", "95 % interval", "argmax match", "steps", "training GFLOP")
    for name in ("initial", "distillspec", "adaspec"):
        alpha, match = result[f"{name}_alpha"], result[f"{name}_argmax_match"]
        if alpha is None:
            continue
        training = result.get(f"{name}_training", {})
        flops = training.get("flops_with_reference", training.get("flops"))
        table.add_row(
            name, f"{alpha['mean']:.3f}", f"{alpha['low']:.3f} – {alpha['high']:.3f}", f"{match['mean']:.3f}",
            str(training.get("step", "–")), "–" if flops is None else f"{flops / 1e9:,.0f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    trained = [name for name in ("distillspec", "adaspec") if f"{name}_draft" in result]
    best = max(trained, key=lambda name: result[f"{name}_alpha"]["mean"])
    console.print(f"Serve the better one with: livedraft serve --draft {result[f'{best}_draft']}", soft_wrap=True)
