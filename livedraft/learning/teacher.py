"""The target as a teacher offline: its whole distribution, where the top tokens of a trace are not enough; and texts that the
draft has a part in (DistillSpec, arXiv 2310.08461, section 3).

Legend: B texts written together, N loss positions, K teacher tokens, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from livedraft.learning.batches import Example, TrainBatch
from livedraft.models.step import ModelStep
from livedraft.records import SamplingParams
from livedraft.sampling import DRAFT_DRAW, draw, logits_to_probs, uniform


class FullTeacher:
    """Every token's probability at every position, from the target in memory: K = V."""

    def __init__(self, target: ModelStep) -> None:
        self._target = target

    def in_full(
        self, batch: TrainBatch, examples: Sequence[Example], lookup_V: torch.Tensor, *, every_position: bool
    ) -> TrainBatch:
        """The batch with the teacher's columns in token order. `every_position` as in `collate`."""
        rows = []
        for example in examples:
            log_probs_TV = torch.log_softmax(_output_logits(self._target, example.token_ids.tolist(), example), -1)
            kept = slice(None) if every_position else torch.from_numpy(example.loss_mask_T)
            rows.append(log_probs_TV[kept])
        log_probs_NV = torch.cat(rows)
        return replace(
            batch,
            teacher_rows_NK=lookup_V.expand(len(log_probs_NV), -1),
            teacher_token_ids_NK=torch.arange(len(lookup_V)).expand(len(log_probs_NV), -1),
            teacher_log_probs_NK=log_probs_NV,
        )


def _output_logits(target: ModelStep, token_ids: list[int], example: Example) -> torch.Tensor:
    """[T, V] float32 at the output positions, as an ordinary tensor that autograd may keep."""
    rows = list(range(example.num_prompt_tokens - 1, len(token_ids)))
    logits_TV = target.forward(token_ids, list(range(len(token_ids))), [0] * len(token_ids), rows).logits_RV
    return logits_TV.cpu().clone()


class Writer:
    """Texts of which some tokens are the draft's and the others the target's."""

    def __init__(
        self, draft: ModelStep, draft_to_target_W: torch.Tensor, target: ModelStep, eos_token_ids: Sequence[int]
    ) -> None:
        """Both models must have as many slots as texts are written together."""
        self._draft, self._target, self._eos = draft, target, set(eos_token_ids)
        self._ids_W = draft_to_target_W.tolist()

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        is_drafts: Callable[[int, int], bool],
        *,
        seed: int,
    ) -> list[list[int]]:
        """`is_drafts(prompt number, position)`: whether that token is the draft's. A model no token is asked of is not run."""
        outputs: list[list[int]] = []
        batch_size = min(self._draft.num_slots, self._target.num_slots)
        for first in range(0, len(prompts), batch_size):
            numbers = range(first, min(first + batch_size, len(prompts)))
            outputs += self._write_together(prompts, list(numbers), sampling, is_drafts, seed)
        return outputs

    def _write_together(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: list[int],
        sampling: SamplingParams,
        is_drafts: Callable[[int, int], bool],
        seed: int,
    ) -> list[list[int]]:
        outputs: dict[int, list[int]] = {number: [] for number in numbers}
        written = {(number, model): 0 for number in numbers for model in (True, False)}
        longest = min(self._draft.max_length, self._target.max_length)
        active = numbers
        while active:
            for use_draft in (True, False):
                some = [n for n in active if is_drafts(n, len(outputs[n])) == use_draft]
                if not some:
                    continue
                model = self._draft if use_draft else self._target
                tokens, positions, slots, rows = [], [], [], []
                for number in some:
                    text = [*prompts[number], *outputs[number]]
                    done = written[number, use_draft]
                    tokens += text[done:]
                    positions += range(done, len(text))
                    slots += [number - numbers[0]] * (len(text) - done)
                    rows.append(len(tokens) - 1)
                    written[number, use_draft] = len(text)
                # X is the vocabulary of whichever model writes.
                probs_BX = logits_to_probs(model.forward(tokens, positions, slots, rows).logits_RV, sampling)
                for number, probs_X in zip(some, probs_BX, strict=True):
                    position = len(outputs[number])
                    column = draw(probs_X, uniform(seed + number, position, DRAFT_DRAW))
                    outputs[number].append(self._ids_W[column] if use_draft else column)
            active = [
                n
                for n in active
                if outputs[n][-1] not in self._eos
                and len(outputs[n]) < sampling.max_tokens
                and len(prompts[n]) + len(outputs[n]) < longest
            ]
        return [outputs[number] for number in numbers]
