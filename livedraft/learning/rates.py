"""Which learning rate suits this target and this traffic? At the start of a stream each of LEARNING_RATES trains its own copy
of the draft on the same batches; the one that did best on requests it had not trained on goes on alone.

Judged prequentially, on the new requests of each step before the step: the held-out requests belong to the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from livedraft.config import LEARNING_RATES, LearningConfig
from livedraft.learning.batches import Example
from livedraft.learning.trainer import BadStepError, Trainer

NUM_REQUESTS = 16
"""New requests that the trial lasts; the second half of them judges."""


class RateTrial:
    def __init__(self, trainer: Trainer, config: LearningConfig) -> None:
        """`trainer` runs at the first rate and is stepped by its owner; the others are made here, from the same weights."""
        self._trainers = [trainer]
        for rate in LEARNING_RATES[1:]:
            self._trainers.append(trainer.copy(replace(config, learning_rate=rate)))
        self._alphas: list[list[float]] = [[] for _ in LEARNING_RATES]
        self._num_requests = 0

    def step(self, new: Sequence[Example], batch: Sequence[Example], between: Callable[[], None]) -> None:
        """Judge all on what is new, then let all but the first train on the batch."""
        self._num_requests += len(new)
        for index, trainer in enumerate(self._trainers):
            if self._num_requests > NUM_REQUESTS // 2:
                self._alphas[index] += [score.alpha for score in trainer.score(new, between=between)]
            if index == 0:
                continue
            try:
                trainer.step(batch, between)
            except BadStepError:
                self._alphas[index].append(-1.0)  # this rate ruins the draft

    def change_vocabulary(self, token_ids: Sequence[int]) -> None:
        for trainer in self._trainers[1:]:
            trainer.change_vocabulary(token_ids)

    @property
    def is_over(self) -> bool:
        return self._num_requests >= NUM_REQUESTS

    def winner(self) -> tuple[Trainer, dict[str, float]]:
        """The best trainer, with what all trainers cost counted to it, and the mean alpha of each rate."""
        means = [sum(alphas) / len(alphas) if alphas else 0.0 for alphas in self._alphas]
        best = self._trainers[means.index(max(means))]
        best.flops = sum(trainer.flops for trainer in self._trainers)
        return best, {f"{rate:g}": round(mean, 4) for rate, mean in zip(LEARNING_RATES, means, strict=True)}
