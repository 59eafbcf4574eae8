"""What `livedraft distill` shows while it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from livedraft.records import UserError


class Screen(AbstractContextManager["Screen"]):
    """Progress bars on standard error, TensorBoard's files, and Weights & Biases where it is asked for."""

    def __init__(self, out: Path, *, use_wandb: bool, is_shown: bool, writes: bool) -> None:
        self._out, self._use_wandb, self._writes = out, use_wandb and writes, writes
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"), TimeRemainingColumn(), console=Console(stderr=True), disable=not is_shown,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}
        self._validation = ""
        if self._use_wandb:
            try:
                import wandb
            except ImportError as error:
                raise UserError("--wandb needs the package wandb: pip install wandb.") from error
            wandb.init(project="livedraft", dir=str(out))
            self._wandb = wandb

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()
        for writer in self._writers.values():
            writer.close()

    def responses(self, num_done: int, num_all: int) -> None:
        self._bar("responses", num_done, num_all, "")

    def step(self, run: str, figures: dict[str, Any], num_steps: int) -> None:
        if "validation_alpha" in figures:
            self._validation = f"alpha {figures['validation_alpha']:.3f}, "
        speed = figures["num_tokens"] / max(figures["seconds"], 1e-9)
        self._bar(
            run, figures["step"], num_steps, f"loss {figures['loss']:.3f}, {self._validation}{speed:.0f} tokens/s"
        )
        if not self._writes:
            return
        shown = {name: value for name, value in figures.items() if name != "step"}
        writer = self._writer(run, figures["step"])
        for name, value in shown.items():
            writer.add_scalar(name, value, figures["step"])
        if self._use_wandb:
            self._wandb.log({f"{run}/{name}": value for name, value in shown.items()})

    def _writer(self, run: str, first_step: int) -> Any:
        if run not in self._writers:
            from tensorboardX import SummaryWriter

            # Steps that a kill undid are forgotten.
            self._writers[run] = SummaryWriter(str(self._out / "tensorboard" / run), purge_step=first_step)
        return self._writers[run]

    def _bar(self, name: str, done: int, total: int, figures: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, figures=figures)
        self._bars.update(self._tasks[name], completed=done, total=total, figures=figures)
