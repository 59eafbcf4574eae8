"""Is greedy text the same? Equal token for token, or parted at a near tie (bf16 rounds differently with the number of rows)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from livedraft.device import choose_execution_path
from livedraft.models.decoder import Decoder
from livedraft.models.load import build_weights, load_model

NEAR_TIE_GAP = 0.25
"""Largest difference of the two tokens' float32 target logits at the first difference."""


@dataclass(kw_only=True)
class Sameness:
    num_compared: int = 0
    num_identical: int = 0
    near_tie_gaps: list[float] = field(default_factory=list)
    other_gaps: list[float] = field(default_factory=list)

    @property
    def num_same(self) -> int:
        """Identical outright, or parted at a near tie only."""
        return self.num_identical + len(self.near_tie_gaps)

    def __add__(self, other: Sameness) -> Sameness:
        return Sameness(
            num_compared=self.num_compared + other.num_compared,
            num_identical=self.num_identical + other.num_identical,
            near_tie_gaps=self.near_tie_gaps + other.near_tie_gaps,
            other_gaps=self.other_gaps + other.other_gaps,
        )


def compare_outputs(
    prompts: list[list[int]], outputs: list[list[int]], other_outputs: list[list[int]], model_path: Path
) -> Sameness:
    """Compare two greedy answers to each prompt; where they part, recompute the target's logits in float32."""
    result = Sameness(num_compared=len(prompts))
    target: Decoder | None = None
    for prompt, output, other in zip(prompts, outputs, other_outputs, strict=True):
        if output == other:
            result.num_identical += 1
            continue
        index = next((i for i, (a, b) in enumerate(zip(output, other, strict=False)) if a != b), None)
        if index is None:  # one is the other's beginning: no tie explains that
            result.other_gaps.append(float("inf"))
            continue
        target = target or _float32_target(model_path)
        context = prompt + output[:index]
        rows = list(range(len(context)))
        logits_V = target.forward(context, rows, [0] * len(rows), [len(rows) - 1]).logits_RV[0]
        gap = abs(logits_V[output[index]] - logits_V[other[index]]).item()
        (result.near_tie_gaps if gap <= NEAR_TIE_GAP else result.other_gaps).append(round(gap, 4))
    return result


def _float32_target(model_path: Path) -> Decoder:
    path = choose_execution_path("float32", "cpu")
    model = load_model(model_path, torch.float32)
    return Decoder(
        model.config,
        build_weights(model, path),
        num_slots=1,
        max_length=min(4096, model.config.max_positions),
        dtype=path.dtype,
        device=path.device,
    )
