"""Curves as SVG. matplotlib is an extra: nothing but `--plot` needs it, and `outputs.py` asks for it before a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WINDOW, _LEAST = 50, 8
"""Requests in a mean, and in the first ones."""


def plot_curves(alphas_by_arm: Mapping[str, Sequence[float]], path: Path) -> None:
    """Alpha over requests, the mean of the last 50 (at first of those there are), one line an arm with its name at its end."""
    figure = _figure()
    axes = figure.subplots()
    for arm, alphas in alphas_by_arm.items():
        means = [
            sum(alphas[max(0, end - _WINDOW) : end]) / min(_WINDOW, end)
            for end in range(min(_LEAST, len(alphas)), len(alphas) + 1)
        ]
        (line,) = axes.plot(range(len(alphas) - len(means) + 1, len(alphas) + 1), means)
        axes.annotate(
            f" {arm}", (len(alphas), means[-1]), color=line.get_color(), va="center", annotation_clip=False
        )  # fmt: skip
    axes.set_xlabel("requests")
    axes.set_ylabel(f"alpha, mean of the last {_WINDOW}")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg")


def plot_cost_growth(figures: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Milliseconds a pass by context length, and a token by number of requests."""
    figure = _figure()
    by_context, *by_batch = figures
    left, right = figure.subplots(1, 2)
    left.plot([int(size) for size in figures[by_context]], list(figures[by_context].values()), marker="o")
    left.set_xlabel("tokens of context, one request")
    left.set_ylabel("ms a token")
    for title in by_batch:
        sizes = [int(size) for size in figures[title]]
        right.plot(
            sizes, [ms / size for size, ms in zip(sizes, figures[title].values(), strict=True)], marker="o", label=title
        )
    right.set_xlabel("requests")
    right.legend()
    for axes in (left, right):
        axes.set_ylim(0)
    figure.savefig(path, format="svg")


def plot_speeds(settings: Sequence[Mapping[str, Any]], engines: Sequence[str], path: Path) -> None:
    """Tokens a second of each engine with its interval, one panel a setting."""
    figure = _figure(height=1.2 + 2.6 * len(settings))
    panels = figure.subplots(len(settings), 1, squeeze=False)[:, 0]
    for axes, setting in zip(panels, settings, strict=True):
        names = [name for name in reversed(engines) if setting[name] is not None]
        speeds = [setting[name] for name in names]
        ends = [setting["intervals"][name] for name in names]
        below = [max(0.0, speed - low) for speed, (low, _) in zip(speeds, ends, strict=True)]
        above = [max(0.0, high - speed) for speed, (_, high) in zip(speeds, ends, strict=True)]
        colours = ["tab:blue" if name.startswith("livedraft") else "tab:gray" for name in names]
        axes.barh([name.replace("_", " ") for name in names], speeds, xerr=[below, above], color=colours)
        axes.set_title(f"batch {setting['batch']}, temperature {setting['temperature']:g}")
    panels[-1].set_xlabel("tokens a second, median and 95 % interval")
    figure.savefig(path, format="svg")


def _figure(height: float = 4.5) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(8, height), layout="constrained")
