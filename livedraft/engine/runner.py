"""Builds the rows of a round and runs them through both models.

Legend: N rows of the target's pass, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from livedraft.engine.scheduler import RoundEntry
from livedraft.models.step import ModelStep
from livedraft.records import Proposal
from livedraft.speculation.draft_length import CostModel, DraftLength
from livedraft.speculation.draft_model import DraftModel
from livedraft.speculation.proposer import ProposalTask, Proposer

_COST_POSITION = 64
"""Context length at which passes are timed."""
_COST_REQUESTS = (1, 2, 4, 8, 16)
_NUM_DRAFT_STEPS = 3
_COST_REPEATS = 9
"""Draft lengths follow from differences of two medians, and those of three are mostly noise."""
_LONG_SECONDS = 0.04
_COST_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)


class Runner:
    def __init__(self, target: ModelStep) -> None:
        self.target = target
        self.num_target_rows = 0
        """Rows of all passes so far: what serving cost."""

    def propose(
        self,
        entries: list[RoundEntry],
        lengths: list[DraftLength],
        proposer: Proposer,
        chances_of: Callable[[float], tuple[float, float]],
    ) -> list[Proposal | None]:
        """A proposal for each entry that decodes with k >= 1 and whose draft has something to say; None for the others, where
        something else may be proposed."""
        proposals: list[Proposal | None] = [None] * len(entries)
        chosen = [index for index, length in enumerate(lengths) if length.k > 0]
        if not chosen:
            return proposals
        tasks = [_task(entries[index], lengths[index], chances_of) for index in chosen]
        for index, proposal in zip(chosen, proposer.propose_ahead(tasks), strict=True):
            proposals[index] = proposal if proposal.draft_token_ids else None
        return proposals

    def verify(self, entries: list[RoundEntry], proposals: list[Proposal | None]) -> list[torch.Tensor]:
        """One target pass for the whole round: pending tokens, then drafted ones. Returns logits_RV for each entry,
        R = drafted + 1, or no rows while its prompt is still being written."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        num_logits = []
        for entry, proposal in zip(entries, proposals, strict=True):
            state = entry.state
            start, end = state.target_length, state.target_length + entry.num_pending_rows
            if proposal is not None and entry.num_pending_rows > 1:
                proposal.settle()  # after a prompt's last rows; the device knows drafted tokens only right after one
            drafted = proposal.draft_token_ids if proposal else []
            rows = state.token_ids[start:end] + drafted
            if entry.is_decoding:
                first_logit = len(token_ids) + entry.num_pending_rows - 1
                logit_rows += range(first_logit, first_logit + len(drafted) + 1)
            num_logits.append(len(drafted) + 1 if entry.is_decoding else 0)
            token_ids += rows
            positions += range(start, start + len(rows))
            slots += [state.slot] * len(rows)
        self.num_target_rows += len(token_ids)
        logits_RV = self.target.forward(token_ids, positions, slots, logit_rows).logits_RV
        return list(logits_RV.split(num_logits))

    def measure_costs(
        self, draft: DraftModel | None, num_repeats: int = _COST_REPEATS, *, is_draft_isolated: bool = False
    ) -> CostModel:
        """Time passes on idle slots: the target's over several row counts, the draft's over several requests, after a target
        pass as in a round, or isolated, with its weights still in the caches.

        Overwrites the slots, so no request may be running.
        """
        start = min(_COST_POSITION, max(0, self.target.max_length - max(_COST_ROWS)))
        most_each = getattr(self.target, "most_rows_each", max(_COST_ROWS))
        row_counts = [
            rows
            for rows in _COST_ROWS
            if start + rows <= self.target.max_length and rows <= most_each * self.target.num_slots
        ]
        _write_prompts(self.target, -(-max(row_counts) // most_each), start)
        seconds = {
            rows: _median_seconds(_pass(self.target, rows, start, most_each), num_repeats) for rows in row_counts
        }
        draft_seconds, write_seconds = {1: 0.0}, 0.0
        if draft is not None:
            batches = [batch for batch in _COST_REQUESTS if batch <= draft.decoder.num_slots]
            _write_prompts(draft.decoder, max(batches), min(_COST_POSITION, draft.max_length - 1))
            # A target pass evicts the draft's weights from the caches, as in a real round.
            before = (lambda: None) if is_draft_isolated else _pass(self.target, 1, start, 1)
            draft_seconds = {
                batch: _median_seconds(_draft_steps(draft, batch), 2 * num_repeats, before) / _NUM_DRAFT_STEPS
                for batch in batches
            }
            written = min(max(_COST_ROWS), draft.max_length)
            write_seconds = _median_seconds(lambda: _write_prompts(draft.decoder, 1, written), num_repeats) / written
        return CostModel(
            target_seconds_by_rows=_never_falling(seconds),
            draft_seconds_by_requests=_never_falling(draft_seconds),
            draft_write_seconds=write_seconds,
        )


def _task(entry: RoundEntry, length: DraftLength, chances_of: Callable[[float], tuple[float, float]]) -> ProposalTask:
    state = entry.state
    return ProposalTask(
        slot=state.slot,
        token_ids=state.token_ids,
        num_prompt_tokens=state.num_prompt_tokens,
        sampling=state.request.sampling,
        seed=state.seed,
        num_tokens=length.k,
        stop_below=length.stop_below,
        prefix=state.prefix,
        chances_of=chances_of,
    )


def _pass(decoder: ModelStep, rows: int, start: int, most_each: int) -> Callable[[], torch.Tensor]:
    """All rows are one request's, as far as a round can have so many of one."""
    token_ids, slots = [0] * rows, [row // most_each for row in range(rows)]
    positions = [start + row % most_each for row in range(rows)]
    return lambda: decoder.forward(token_ids, positions, slots, list(range(rows))).logits_RV


def _draft_steps(draft: DraftModel, batch: int) -> Callable[[], object]:
    """A few tokens of each of `batch` requests. The first finds the caches cold."""
    position = max(0, min(_COST_POSITION, draft.max_length - _NUM_DRAFT_STEPS))
    return lambda: draft.time_steps(batch, position, _NUM_DRAFT_STEPS)


def _never_falling(seconds_by_count: dict[int, float]) -> dict[int, float]:
    """Fewer rows cannot cost more: where the clock says so, it was another process's noise."""
    least, result = float("inf"), {}
    for count in sorted(seconds_by_count, reverse=True):
        least = min(least, seconds_by_count[count])
        result[count] = least
    return dict(sorted(result.items()))


def _write_prompts(model: ModelStep, num_slots: int, length: int) -> None:
    """A slot is written from its beginning; some runtimes insist."""
    for slot in range(num_slots if length else 0):
        model.forward([0] * length, list(range(length)), [slot] * length, [])


def _median_seconds(run: Callable[[], object], num_repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Of a run after one that is not counted. Long runs are repeated less: noise weighs less on them, and a start waits."""

    def finished(work: Callable[[], object]) -> None:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or launches would be timed, not passes

    started = time.perf_counter()
    finished(run)
    if time.perf_counter() - started > _LONG_SECONDS:
        num_repeats = -(-num_repeats // 3)
    seconds = []
    for _ in range(num_repeats):
        finished(before)
        started = time.perf_counter()
        finished(run)
        seconds.append(time.perf_counter() - started)
    return median(seconds)
