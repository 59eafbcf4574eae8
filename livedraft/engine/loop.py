"""The engine's thread: takes requests in between two rounds, runs rounds while there is work, hands tokens over after each."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from livedraft.engine.engine import Engine
from livedraft.engine.request import RequestState
from livedraft.records import Request, Update

logger = logging.getLogger("livedraft")
Deliver = Callable[[Update], None]


class EngineLoop:
    """A `Backend` around an engine. From the moment it is made only its own thread touches the engine.

    `on_busy` is told whenever the engine begins or stops having work, so the trainer can step aside.
    """

    def __init__(
        self, engine: Engine, *, num_threads: int, on_busy: Callable[[bool], None] = lambda is_busy: None
    ) -> None:
        self.engine = engine
        self.max_model_len = engine.config.max_model_len
        self.vocabulary_size = engine.runner.target.vocabulary_size
        self._num_threads = num_threads
        self._on_busy = on_busy
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: dict[str, tuple[RequestState, Deliver]] = {}
        self._wake = threading.Event()
        self._closing = False
        self._num_finished: dict[str, int] = {}
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._spent: tuple[float, float, bool, float] = (0.0, 0.0, False, time.monotonic())
        """Seconds with work and without, until the last change; whether there is work since then, and when that was. In one
        piece, for other threads."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- from any thread --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises ValueError as the engine's `check`; it only reads what never changes."""
        self.engine.check(request)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request that passed `check`. `deliver` is called from the engine's thread and must not block."""
        submitted_at = time.time()
        self._post(lambda: self._add(request, deliver, submitted_at))

    def cancel(self, request_id: str) -> None:
        """Its slot is free from the next round on and nothing more is delivered; an unknown id is ignored."""
        self._post(lambda: self._cancel(request_id))

    def close(self) -> None:
        """Cancel what runs and end the thread. Safe to call twice."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def busy_and_idle_seconds(self) -> tuple[float, float]:
        """With work and without, up to now."""
        busy, idle, is_busy, since = self._spent
        passed = time.monotonic() - since
        return (busy + passed, idle) if is_busy else (busy, idle + passed)

    def snapshot(self) -> dict[str, Any]:
        """Gauges and counters. Read without a lock: each figure is whole, two of them may be a round apart."""
        engine = self.engine
        running, waiting = list(engine.scheduler.running), len(engine.scheduler.waiting) + len(self._inbox)
        num_slots = engine.config.max_num_seqs
        return {
            "num_requests_running": len(running),
            "num_requests_waiting": waiting,
            "num_slots": num_slots,
            "kv_cache_usage_perc": sum(s.target_length for s in running) / (num_slots * engine.config.max_model_len),
            "draft_version": engine.draft_version,
            "prefix_cache_queries": engine.prefixes.num_queried_tokens,
            "prefix_cache_hits": engine.prefixes.num_hit_tokens,
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": self._num_output_tokens,
            "num_emitted_tokens": engine.stats.num_emitted_tokens,
            "finished": dict(self._num_finished),
            "speculation": list(engine.stats_by_version.items()),
            "busy_seconds": self.busy_and_idle_seconds()[0],
            "estimated_seconds": engine.estimate.seconds,
            "estimated_plain_seconds": engine.estimate.plain_seconds,
            "drafts": engine.drafting.report(max(1, len(running))),
        }

    # --- on the engine's thread -------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # a thread has its own count, and the swap watcher sets another
        is_busy = False
        while True:
            self._wake.clear()
            if self._closing:  # looked at after the clear, or a wake-up by `close` could be lost
                break
            while self._inbox:
                self._guarded(self._inbox.popleft())
            if self.engine.has_work != is_busy:
                spent = self.busy_and_idle_seconds()
                is_busy = not is_busy
                self._spent = (*spent, is_busy, time.monotonic())
                self._on_busy(is_busy)
            if is_busy:
                self._guarded(self._round)
            else:
                self._wake.wait()
        for request_id in list(self._live):
            self._guarded(partial(self._cancel, request_id))
        self._on_busy(False)

    def _guarded(self, command: Callable[[], None]) -> None:
        """The thread must outlive whatever is raised in it: everybody's answers come from it."""
        try:
            command()
        except Exception:
            logger.exception("The engine's thread met an unexpected error and goes on.")

    def _round(self) -> None:
        self.engine.round()
        for state, deliver in list(self._live.values()):
            if state.finish_reason is not None or state.num_output_tokens > state.num_delivered:
                self._hand_over(state, deliver)

    def _add(self, request: Request, deliver: Deliver, submitted_at: float) -> None:
        try:
            state = self.engine.add_request(request)
        except Exception as error:
            logger.exception("Request %s could not be queued.", request.id)
            deliver(Update(token_ids=(), finish_reason="error", error=str(error)))
            return
        state.arrived_at = submitted_at
        self._live[request.id] = (state, deliver)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._live and self.engine.cancel(request_id):
            state, deliver = self._live[request_id]
            self._hand_over(state, deliver)

    def _hand_over(self, state: RequestState, deliver: Deliver) -> None:
        start, state.num_delivered = state.num_delivered, state.num_output_tokens
        update = Update(
            token_ids=tuple(state.token_ids[state.num_prompt_tokens + start :]),
            logprobs=tuple(state.logprobs[start:]),
            num_drafted=state.round_num_drafted,
            num_accepted=state.round_num_accepted,
            proposer=state.round_proposer,
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            error=state.error,
            counts=state.counts() if state.finish_reason else None,
        )
        if state.finish_reason is not None:
            del self._live[state.request.id]
            self._num_finished[state.finish_reason] = self._num_finished.get(state.finish_reason, 0) + 1
            self._num_prompt_tokens += state.num_prompt_tokens
            self._num_output_tokens += state.num_output_tokens
        try:
            deliver(update)
        except Exception:  # the receiver is gone; its request goes, the others stay
            logger.exception("Handing over request %s failed; it is cancelled.", state.request.id)
            if state.finish_reason is None:
                self._live.pop(state.request.id)
                self.engine.cancel(state.request.id)
