"""Who runs in the coming round: admission into free slots, first come first served, and a shared prefill budget."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from livedraft.config import EngineConfig
from livedraft.engine.request import RequestState


@dataclass(frozen=True, kw_only=True)
class RoundEntry:
    """One request's part in a round: how many pending tokens are written, and whether it then decodes."""

    state: RequestState
    num_pending_rows: int
    is_decoding: bool
    """All pending tokens are written, so the last row's logits give the next token."""


class Scheduler:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first keeps batches contiguous

    def add(self, state: RequestState) -> None:
        self.waiting.append(state)

    def admit(self, should_wait: Callable[[RequestState], bool] = lambda state: False) -> list[RequestState]:
        """Move waiting requests into free slots, except those that had better wait a round; returns the newly admitted."""
        admitted = []
        waiting_on: deque[RequestState] = deque()
        while self.waiting and self._free_slots:
            state = self.waiting.popleft()
            if should_wait(state):
                waiting_on.append(state)
                continue
            state.slot = heapq.heappop(self._free_slots)
            state.admitted_at = time.time()
            self.running.append(state)
            admitted.append(state)
        self.waiting.extendleft(reversed(waiting_on))
        self.running.sort(key=lambda state: state.slot)
        return admitted

    def release(self, state: RequestState) -> None:
        """Forget a request, running or still waiting."""
        if state.slot < 0:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        heapq.heappush(self._free_slots, state.slot)

    def plan_round(self) -> list[RoundEntry]:
        """Every decoding request, and prompt tokens of the others while the budget lasts, oldest request first."""
        budget = self.config.prefill_token_budget
        entries = []
        for state in sorted(self.running, key=lambda state: state.arrived_at):
            rows = state.num_pending
            if rows > 1:
                rows = min(rows, budget)
                budget -= rows
                if rows == 0:
                    continue
            entries.append(RoundEntry(state=state, num_pending_rows=rows, is_decoding=rows == state.num_pending))
        entries.sort(key=lambda entry: entry.state.slot)
        return entries
