"""A draft distilled offline, before the first request: DistillSpec (arXiv 2310.08461) and AdaSPEC (arXiv 2510.19779).

  1. Prompts are split: some, chosen by their text, are only ever measured on.
  2. DistillSpec: the initial draft learns the target's distribution at every position of the responses.
  3. AdaSPEC: another copy of the initial draft learns too, but of each window only the positions where it has most to gain by
     the example of 2., which is its reference.
  4. Initial draft, 2. and 3. are measured on the prompts kept back.

Runs 2. and 3. are `Distillation`s. Each has a folder of its own and goes on from its last checkpoint after a kill as if there
had been none: the order of the texts follows from the seed, and everything a step depends on is in the checkpoint.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError

from livedraft.config import DistillConfig
from livedraft.drafts.weights import DraftWeights, load_draft, save_draft
from livedraft.learning.batches import Example
from livedraft.learning.checkpoint import read_checkpoint, write_checkpoint
from livedraft.learning.scoring import Score
from livedraft.learning.selection import Selection
from livedraft.learning.trainer import BadStepError, StepReport, Trainer
from livedraft.records import UserError

DRAFT_NAME, CHECKPOINT_NAME, METRICS_NAME = "draft.safetensors", "checkpoint.safetensors", "metrics.jsonl"
_RESAMPLES = 2000
Responses = Callable[[int, DraftWeights], list[Example]]
"""(epoch, the draft at its start) to what the epoch trains on."""


class Progress(Protocol):
    """Told after every step; `figures` are the numbers of the metrics file."""

    def __call__(self, run: str, figures: dict[str, Any], num_steps: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over requests with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], seed: int = 0) -> Interval:
        """By the bootstrap: the mean of as many values drawn with replacement, many times over."""
        array = np.array(values)
        means = np.random.default_rng(seed).choice(array, (_RESAMPLES, len(array))).mean(1)
        low, high = np.quantile(means, (0.025, 0.975))
        return cls(mean=float(array.mean()), low=float(low), high=float(high))

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in (("mean", self.mean), ("low", self.low), ("high", self.high))}


def is_validation(prompt_token_ids: Sequence[int], share: float) -> bool:
    """By a hash of the prompt: the same split in every run, and every copy of a prompt on one side."""
    return zlib.crc32(np.array(prompt_token_ids, dtype=np.int64).tobytes()) / 2**32 < share


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """(training, validation). Raises UserError when one of the two is empty."""
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        sides[is_validation(example.token_ids[: example.num_prompt_tokens], share)].append(example)
    if not all(sides):
        raise UserError(
            f"Of {len(examples)} prompts {len(sides[1])} are kept back for measuring; give more prompts or another "
            "validation_share, and another --out."
        )
    return sides


def selection_of(reference: DraftWeights, config: DistillConfig) -> Selection:
    """AdaSPEC's choice as the settings have it."""
    return Selection(reference=reference, fraction=config.select_fraction, keep=config.select)


def rate_of(config: DistillConfig) -> float:
    """The learning rate of a run that keeps a fraction of the positions."""
    return config.learning_rate * (config.select_fraction if config.rescale_rate else 1.0)


class Distillation:
    """One draft trained on responses, in a folder it can go on from."""

    def __init__(
        self,
        name: str,
        folder: Path,
        trainer: Trainer,
        config: DistillConfig,
        *,
        epochs: int,
        validation: Sequence[Example],
        selection: Selection | None = None,
        progress: Progress = lambda *_: None,
    ) -> None:
        """`trainer` holds the initial draft."""
        self.name, self.folder, self.trainer, self.config = name, folder, trainer, config
        self.epochs, self.validation, self.selection, self.progress = epochs, validation, selection, progress
        self._seconds = 0.0
        self._num_tokens = 0

    def run(self, responses: Responses) -> DraftWeights:
        """Train to the end and leave `draft.safetensors`; done before, it is only read."""
        path = self.folder / DRAFT_NAME
        if path.exists():
            return load_draft(path)
        if self.trainer.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
        first_step = self._restore()
        step = 0
        for epoch in range(self.epochs):
            examples = responses(epoch, self.trainer.snapshot())
            batches = self._batches(examples, epoch)
            total = self.epochs * len(batches)
            for batch in batches:
                step += 1
                if step <= first_step:
                    continue
                figures = self._step(batch, step, is_last=step == total)
                self.progress(self.name, figures, total)
                if step % self.config.checkpoint_steps == 0 and step < total:
                    self._keep_checkpoint(step)
        draft = self.trainer.snapshot()
        self._save(draft, path)
        if self.trainer.ranks.is_first:
            (self.folder / CHECKPOINT_NAME).unlink(missing_ok=True)
        self.trainer.ranks.wait()
        return draft

    def _batches(self, examples: Sequence[Example], epoch: int) -> list[list[Example]]:
        order = np.random.default_rng([self.config.seed, epoch]).permutation(len(examples))
        size = self.config.batch_size
        return [[examples[index] for index in order[start : start + size]] for start in range(0, len(order), size)]

    def _step(self, batch: list[Example], step: int, *, is_last: bool) -> dict[str, Any]:
        started = time.monotonic()
        try:
            report = self.trainer.step(batch, selection=self.selection)
        except BadStepError as error:
            raise UserError(
                f"Training stopped at step {step}: {error}; take a lower --learning-rate and another --out."
            ) from error
        self._num_tokens += sum(example.num_tokens for example in batch)
        self._seconds += time.monotonic() - started
        figures = self._figures(report, step)
        if is_last or step % self.config.validate_steps == 0:
            figures["validation_alpha"] = round(float(np.mean(self.alphas(None))), 5)
        if self.config.save_steps and step % self.config.save_steps == 0:
            self._save(self.trainer.snapshot(), self.folder / f"step-{step:06d}.safetensors")
        if self.trainer.ranks.is_first:
            path = self.folder / METRICS_NAME
            with _writing(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
        return figures

    def _figures(self, report: StepReport, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "loss": round(report.loss, 6),
            "train_alpha": round(report.alpha, 5),
            "num_selected": report.num_selected,
            "num_positions": report.num_positions,
            "num_tokens": self._num_tokens,
            "flops": self._flops,
            "seconds": round(self._seconds, 2),
        }

    @property
    def _flops(self) -> float:
        return float(self.trainer.flops)

    def alphas(self, draft: DraftWeights | None) -> list[float]:
        """Of each validation request, under a draft or under what training has come to."""
        return [score.alpha for score in self.scores(draft)]

    def scores(self, draft: DraftWeights | None) -> list[Score]:
        before = self.trainer.flops  # measuring is no training
        scores = self.trainer.score(self.validation, draft)
        self.trainer.flops = before
        return scores

    # --- surviving a kill ---------------------------------------------------------------------------------------------

    def _save(self, draft: DraftWeights, path: Path) -> None:
        """Under another name first: a draft's file is whole or not there."""
        if self.trainer.ranks.is_first:
            part = path.with_name(path.name + ".part")
            with _writing(path):
                save_draft(draft, part)
                os.replace(part, path)

    def _keep_checkpoint(self, step: int) -> None:
        if not self.trainer.ranks.is_first:
            return
        metrics = self.folder / METRICS_NAME
        metadata = {
            "step": step, "metrics_bytes": metrics.stat().st_size, "flops": self._flops, "seconds": self._seconds,
            "num_tokens": self._num_tokens,
        }  # fmt: skip
        path = self.folder / CHECKPOINT_NAME
        with _writing(path):
            write_checkpoint(path, self.trainer.state_tensors(), metadata)

    def _restore(self) -> int:
        """The step the last checkpoint was made at; 0 without one."""
        path, metrics = self.folder / CHECKPOINT_NAME, self.folder / METRICS_NAME
        is_first = self.trainer.ranks.is_first
        if not path.exists():
            if is_first:
                metrics.unlink(missing_ok=True)
            self.trainer.ranks.wait()
            return 0
        try:
            tensors, metadata = read_checkpoint(path)
            self.trainer.load_state_tensors(tensors)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it to train from the start.") from error
        self.trainer.flops = metadata["flops"]
        self._seconds, self._num_tokens = metadata["seconds"], metadata["num_tokens"]
        if is_first:
            with suppress(OSError):
                os.truncate(metrics, metadata["metrics_bytes"])
        self.trainer.ranks.wait()
        return int(metadata["step"])


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk is one sentence; the run goes on from its last checkpoint."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} could not be written ({error}); make room and give the same command again.") from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """A run's figures, step by step."""
    return [json.loads(line) for line in (folder / METRICS_NAME).read_text(encoding="utf-8").splitlines()]


def trainer_at_rate(trainer: Trainer, rate: float) -> Trainer:
    """A trainer of the same kind that starts from the same weights."""
    return trainer.copy(replace(trainer.config, learning_rate=rate))
