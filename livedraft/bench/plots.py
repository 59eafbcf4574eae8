"""Curves as SVG. matplotlib is an extra: nothing but `--plot` needs it, and `outputs.py` asks for it before a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WINDOW = 50


def plot_curves(alphas_by_arm: Mapping[str, Sequence[float]], path: Path) -> None:
    """Alpha over requests, a moving mean of 50, one line an arm."""
    figure = _figure()
    axes = figure.subplots()
    for arm, alphas in alphas_by_arm.items():
        starts = range(max(1, len(alphas) - _WINDOW + 1))
        axes.plot(
            [start + min(_WINDOW, len(alphas)) for start in starts],
            [sum(alphas[start : start + _WINDOW]) / len(alphas[start : start + _WINDOW]) for start in starts],
            label=arm,
        )
    axes.set_xlabel("requests")
    axes.set_ylabel(f"alpha, mean of the last {_WINDOW}")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.savefig(path, format="svg")


def plot_cost_growth(ms_by_context: Mapping[str, float], ms_by_batch: Mapping[str, float], path: Path) -> None:
    """Milliseconds a pass by context length and by number of requests."""
    figure = _figure()
    for axes, (title, figures) in zip(
        figure.subplots(1, 2), (("tokens of context", ms_by_context), ("requests", ms_by_batch)), strict=True
    ):
        sizes = [int(size) for size in figures]
        axes.plot(sizes, list(figures.values()), marker="o")
        axes.set_xlabel(title)
        axes.set_ylabel("ms a pass")
        axes.set_ylim(0)
    figure.savefig(path, format="svg")


def _figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 4.5), layout="constrained")
