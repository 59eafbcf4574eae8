"""The engine: requests in, tokens out, one round at a time. Plain decoding is the same code with no proposer.

Not thread-safe: one thread owns it. A new draft is offered from any thread through `offer_draft` and taken up between
rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.engine.request import RequestState
from livedraft.engine.runner import Runner
from livedraft.engine.scheduler import RoundEntry, Scheduler
from livedraft.engine.tracing import TraceBuilder
from livedraft.events import Events
from livedraft.models.step import ModelStep
from livedraft.records import Proposal, Request, Trace, Verdict
from livedraft.speculation.draft_length import CostModel, DraftLength, DraftLengthPolicy
from livedraft.speculation.draft_model import DraftModel
from livedraft.speculation.stats import SpeculationStats
from livedraft.speculation.verify import verify, verify_exact

TraceSink = Callable[[Trace], None]


class Engine:
    def __init__(
        self,
        target: ModelStep,
        draft: DraftModel | None,
        *,
        config: EngineConfig,
        speculation: SpeculationConfig,
        events: Events,
        eos_token_ids: tuple[int, ...] = (),
        target_fingerprint: str = "",
        trace_sink: TraceSink | None = None,
        costs: CostModel | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation
        self.events = events
        self.eos_token_ids = frozenset(eos_token_ids)
        self.target_fingerprint = target_fingerprint
        self.trace_sink = trace_sink
        self.scheduler = Scheduler(config)
        self.runner = Runner(target)
        self.draft = draft
        self.costs = costs or self.runner.measure_costs(draft)
        self.lengths = self.new_length_policy()
        self.stats = SpeculationStats()
        self._offer: tuple[DraftModel | None, float | None] | None = None
        self._offer_lock = threading.Lock()

    # --- what callers use -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> RequestState:
        """Queue a request. Raises ValueError as `check` does."""
        self.check(request)
        state = RequestState.from_request(request)
        state.draft_version_at_arrival = self.draft_version
        if self.trace_sink is not None and request.store:
            state.trace = TraceBuilder()
        self.scheduler.add(state)
        return state

    def check(self, request: Request) -> None:
        """Raises ValueError when a request cannot be served, with a sentence for the client."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt == 0:
            raise ValueError("The prompt is empty; give at least one token.")
        if num_prompt + max_tokens > self.config.max_model_len:
            raise ValueError(
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together they pass the limit of "
                f"{self.config.max_model_len}. Shorten the prompt or lower max_tokens."
            )
        vocabulary_size = self.runner.target.vocabulary_size
        if not all(0 <= token < vocabulary_size for token in request.prompt_token_ids):
            raise ValueError(f"The prompt holds token ids outside 0..{vocabulary_size - 1}.")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def draft_version(self) -> str:
        """The version really served, not the one the registry names."""
        return self.draft.version if self.draft else "none"

    def new_length_policy(self) -> DraftLengthPolicy:
        return DraftLengthPolicy(
            self.costs,
            max_tokens=self.speculation.max_num_speculative_tokens,
            fixed=self.speculation.num_speculative_tokens,
        )

    def offer_draft(self, draft: DraftModel | None, prior: float | None = None) -> None:
        """From any thread: serve this draft from the next round on. `prior` is its expected acceptance."""
        with self._offer_lock:
            self._offer = (draft, prior)

    def withdraw_offer(self) -> None:
        """Keep the draft that is in service."""
        with self._offer_lock:
            self._offer = None

    @torch.inference_mode()
    def step(self) -> list[RequestState]:
        """One round: propose, verify, commit. Returns the requests that finished in it."""
        self._take_up_offered_draft()
        self.scheduler.admit()
        entries = self.scheduler.plan_round()
        if not entries:
            return []
        lengths = self._draft_lengths(entries)
        proposals = self.runner.propose(entries, lengths, self.draft, self.lengths.acceptance_of)
        target_logits = self.runner.verify(entries, proposals)
        verdicts = self._verdicts(entries, proposals, target_logits)
        for entry, proposal, logits_RV, verdict in zip(entries, proposals, target_logits, verdicts, strict=True):
            self._commit(entry, proposal, logits_RV, verdict)
        return self._release_finished(entries)

    # --- the parts of a round ---------------------------------------------------------------------------------------

    def _take_up_offered_draft(self) -> None:
        if self._offer is None:
            return
        with self._offer_lock:
            (draft, prior), self._offer = self._offer, None
        previous = self.draft_version
        self.draft = draft  # its cache is empty: running requests catch up by the lag rule
        if prior is not None:
            self.lengths.set_prior(prior)
        self.events.emit("draft_swapped", previous=previous, version=self.draft_version)

    def _draft_lengths(self, entries: list[RoundEntry]) -> list[DraftLength]:
        """For each request: the round's choice, less where fewer tokens are still wanted (the bonus is one)."""
        num_decoding = sum(entry.is_decoding for entry in entries)
        if self.draft is None or num_decoding == 0:
            return [DraftLength(k=0)] * len(entries)
        num_prefill_rows = sum(entry.num_pending_rows for entry in entries if entry.is_prefilling)
        length = self.lengths.choose(num_decoding, num_prefill_rows)
        wanted = []
        for entry in entries:
            num_left = entry.state.request.sampling.max_tokens - entry.state.num_output_tokens
            wanted.append(replace(length, k=min(length.k, num_left - 1) if entry.is_decoding else 0))
        return wanted

    def _verdicts(
        self, entries: list[RoundEntry], proposals: list[Proposal | None], target_logits: list[torch.Tensor]
    ) -> list[Verdict | None]:
        """None for a request whose prompt is still being written. A greedy round takes one argmax for all rows;
        `verify` is its slow twin."""
        if all(entry.state.request.sampling.is_greedy for entry in entries):
            choices = torch.cat(target_logits).argmax(-1).tolist()
            verdicts: list[Verdict | None] = []
            start = 0
            for proposal, logits_RV in zip(proposals, target_logits, strict=True):
                end = start + logits_RV.shape[0]
                drafted = proposal.draft_token_ids if proposal else []
                verdicts.append(verify_exact(choices[start:end], drafted) if end > start else None)
                start = end
            return verdicts
        return [
            verify(logits_RV, proposal, state.request.sampling, state.seed, state.num_output_tokens)
            if logits_RV.shape[0]
            else None
            for state, proposal, logits_RV in zip(
                (entry.state for entry in entries), proposals, target_logits, strict=True
            )
        ]

    def _commit(
        self, entry: RoundEntry, proposal: Proposal | None, logits_RV: torch.Tensor, verdict: Verdict | None
    ) -> None:
        """Append the verdict's tokens, trimmed at end-of-sequence and max_tokens, and rewind both caches."""
        state = entry.state
        if verdict is None:
            state.target_length += entry.num_pending_rows
            return
        first_position = state.num_output_tokens
        output, state.finish_reason = self._trim(state, verdict.output_token_ids)
        num_drafted = len(proposal.draft_token_ids) if proposal else 0
        num_accepted = min(verdict.num_accepted, len(output))
        state.token_ids.extend(output)
        state.target_length = len(state.token_ids) - 1
        if self.draft is not None:
            self.draft.commit(state.slot, state.target_length)
        state.num_rounds += 1
        state.first_token_at = state.first_token_at or time.time()
        for stats in (state.stats, self.stats):
            stats.record(num_drafted=num_drafted, num_accepted=num_accepted, num_emitted=len(output))
        self.lengths.record(num_drafted, verdict.num_accepted, proposal.confidences if proposal else ())
        if state.trace is not None:
            state.trace.add_round(
                target_logits_RV=logits_RV,
                proposal=proposal,
                num_accepted=verdict.num_accepted,
                num_committed=len(output),
                first_position=first_position,
                round_number=state.num_rounds - 1,
            )

    def _trim(self, state: RequestState, output: list[int]) -> tuple[list[int], str | None]:
        """Cut at the first end-of-sequence or stop token (kept) or at max_tokens, inside the accepted block too."""
        sampling = state.request.sampling
        for index, token in enumerate(output):
            is_stop = token in sampling.stop_token_ids or (token in self.eos_token_ids and not sampling.ignore_eos)
            if is_stop:
                return output[: index + 1], "stop"
            if state.num_output_tokens + index + 1 == sampling.max_tokens:
                return output[: index + 1], "length"
        return output, None

    def _release_finished(self, entries: list[RoundEntry]) -> list[RequestState]:
        finished = [entry.state for entry in entries if entry.state.finish_reason]
        for state in finished:
            state.finished_at = time.time()
            self.scheduler.release(state)
            if self.draft is not None:
                self.draft.release(state.slot)
            if state.trace is not None and self.trace_sink is not None:
                self.trace_sink(state.trace.finish(state, self.target_fingerprint))
        return finished
