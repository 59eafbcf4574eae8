"""Interleaved timing: every contender answers the same prompt before the next prompt comes, in rotating order, so noise
and drift of a shared machine fall on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np

Prompt = TypeVar("Prompt")


@dataclass(kw_only=True)
class Timing:
    """One contender's answers: seconds and tokens of each (round, prompt), and the last output of each prompt."""

    seconds: list[list[float]] = field(default_factory=list)
    num_tokens: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def extend(self, later: Timing) -> None:
        """Append another run's rounds over the same prompts; its outputs replace the older ones."""
        self.seconds += later.seconds
        self.num_tokens += later.num_tokens
        self.outputs = later.outputs

    def speeds(self) -> list[float]:
        """Tokens a second of each round: all its tokens by all its seconds."""
        return [sum(tokens) / sum(seconds) for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)]

    def tokens_per_second(self) -> float:
        """Median over rounds."""
        return median(self.speeds())

    def pair_ratios(self, baseline: Timing) -> list[float]:
        """This contender's tokens a second over the baseline's, for each (round, prompt): alternating pairs."""
        return [
            (n / s) / (base_n / base_s)
            for tokens, seconds, base_tokens, base_seconds in zip(
                self.num_tokens, self.seconds, baseline.num_tokens, baseline.seconds, strict=True
            )
            for n, s, base_n, base_s in zip(tokens, seconds, base_tokens, base_seconds, strict=True)
        ]


def median_with_lower_bound(
    ratios: Sequence[float], *, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The median and its lower 95 % bound by bootstrap over the pairs."""
    values = np.asarray(ratios)
    picks = np.random.default_rng(seed).integers(0, len(values), size=(num_resamples, len(values)))
    return float(np.median(values)), float(np.quantile(np.median(values[picks], axis=1), 0.05))


def mean_with_bounds(values: Sequence[float], seed: int = 0, *, num_resamples: int = 4000) -> dict[str, float]:
    """The mean and its 95 % interval by bootstrap."""
    array = np.asarray(values)
    picks = np.random.default_rng(seed).integers(0, len(array), size=(num_resamples, len(array)))
    low, high = np.quantile(array[picks].mean(axis=1), (0.025, 0.975))
    return {"mean": round(float(array.mean()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def alternate(
    contenders: Mapping[str, Callable[[Prompt], list[int]]],
    prompts: Sequence[Prompt],
    *,
    num_rounds: int,
    report: Callable[[str, int, int], None] = lambda _text, _num_done, _num_all: None,
) -> dict[str, Timing]:
    """Time `contenders` (prompt -> output token ids) over all prompts, `num_rounds` times."""
    names = list(contenders)
    timings = {name: Timing(outputs=[[] for _ in prompts]) for name in names}
    for round_number in range(num_rounds):
        for timing in timings.values():
            timing.seconds.append([])
            timing.num_tokens.append([])
        for index, prompt in enumerate(prompts):
            first = (round_number + index) % len(names)
            for name in names[first:] + names[:first]:
                started = time.perf_counter()
                output = contenders[name](prompt)
                timings[name].seconds[-1].append(time.perf_counter() - started)
                timings[name].num_tokens[-1].append(len(output))
                timings[name].outputs[index] = output
            report("prompts", round_number * len(prompts) + index + 1, num_rounds * len(prompts))
    return timings
