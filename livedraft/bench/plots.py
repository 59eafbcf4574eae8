"""Curves as SVG. matplotlib is an extra: nothing but `--plot` needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from livedraft.records import UserError

_WINDOW = 50


def plot_curves(alphas_by_arm: Mapping[str, Sequence[float]], path: Path) -> None:
    """Alpha over requests, a moving mean of 50, one line an arm. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot needs matplotlib; install it with: pip install 'livedraft[bench]'.") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
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
