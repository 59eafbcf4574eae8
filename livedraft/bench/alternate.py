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

    def answer_speeds(self) -> list[float]:
        """Tokens a second of each (round, prompt)."""
        return [
            n / s
            for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)
            for n, s in zip(tokens, seconds, strict=True)
        ]

    def pair_ratios(self, baseline: Timing) -> list[float]:
        """This contender's tokens a second over the baseline's, for each (round, prompt): alternating pairs."""
        return [own / base for own, base in zip(self.answer_speeds(), baseline.answer_speeds(), strict=True)]


def pair_figures(timing: Timing, baseline: Timing) -> dict[str, float]:
    """The median of the pairs' ratios with its lower 95 % bound, rounded."""
    return ratio_figures(timing.pair_ratios(baseline))


def ratio_figures(ratios: Sequence[float]) -> dict[str, float]:
    ratio, bound = median_with_lower_bound(ratios)
    return {"ratio": round(ratio, 3), "lower_bound": round(bound, 3)}


def median_with_lower_bound(ratios: Sequence[float]) -> tuple[float, float]:
    """The median and its lower 95 % bound by bootstrap over the pairs."""
    return float(np.median(ratios)), float(np.quantile(_bootstrapped(ratios), 0.05))


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % interval by bootstrap over the answers."""
    low, high = np.quantile(_bootstrapped(values), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def _bootstrapped(values: Sequence[float], *, num_resamples: int = 10_000, seed: int = 0) -> np.ndarray:
    picks = np.random.default_rng(seed).integers(0, len(values), size=(num_resamples, len(values)))
    return np.median(np.asarray(values)[picks], axis=1)


def joined(answer: Callable[[Prompt], Sequence[list[int]]]) -> Callable[[Prompt], list[int]]:
    """Of several prompts answered together: all their tokens, one after another."""
    return lambda group: [token for output in answer(group) for token in output]


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
    name: str = "prompts",
    rest_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time `contenders` (prompt -> output token ids) over all prompts, `num_rounds` times. `name` is what
    is reported of; `rest_seconds` before each answer:
    other engines' threads still spin for a while after their own."""
    names = list(contenders)
    timings = {name: Timing(outputs=[[] for _ in prompts]) for name in names}
    for round_number in range(num_rounds):
        for timing in timings.values():
            timing.seconds.append([])
            timing.num_tokens.append([])
        for index, prompt in enumerate(prompts):
            first = (round_number + index) % len(names)
            for contender in names[first:] + names[:first]:
                time.sleep(rest_seconds)
                started = time.perf_counter()
                output = contenders[contender](prompt)
                timings[contender].seconds[-1].append(time.perf_counter() - started)
                timings[contender].num_tokens[-1].append(len(output))
                timings[contender].outputs[index] = output
            report(name, round_number * len(prompts) + index + 1, num_rounds * len(prompts))
    return timings
