"""The engine: requests in, tokens out, one round at a time. Plain decoding is the same code with no proposer.

Not thread-safe: one thread owns it (`EngineLoop` for a server, the caller otherwise). A new draft is offered from any thread
through `offer_draft` and taken up between rounds.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.engine.drafting import DEFAULT_PRIOR, Drafting, Lineup
from livedraft.engine.estimate import PlainEstimate
from livedraft.engine.prefix_cache import PrefixCache
from livedraft.engine.request import RequestState
from livedraft.engine.runner import Runner
from livedraft.engine.scheduler import RoundEntry, Scheduler
from livedraft.engine.tracing import TraceBuilder, TracedRound, record_rounds
from livedraft.events import Events, starting
from livedraft.grammar import GrammarError
from livedraft.models.step import ModelStep
from livedraft.models.top_tokens import best_tokens
from livedraft.records import (
    DEFAULT_ROUTE,
    ContextTooLongError,
    FinishReason,
    Proposal,
    Request,
    Trace,
    Verdict,
    is_held_out,
)
from livedraft.sampling import raw_logprobs
from livedraft.speculation.draft_length import CostModel
from livedraft.speculation.draft_model import DraftModel
from livedraft.speculation.prediction import VERSION as PREDICTION
from livedraft.speculation.prediction import Prediction
from livedraft.speculation.prefix import PrefixState
from livedraft.speculation.stats import SpeculationStats
from livedraft.speculation.suffix import VERSION as SUFFIX
from livedraft.speculation.suffix import SuffixMatcher, Traffic
from livedraft.speculation.verify import verify, verify_exact, verify_together
from livedraft.tokenizer import TextStream

logger = logging.getLogger("livedraft")
TraceSink = Callable[[Trace], None]
_WORTH_WAITING_FOR = 64
"""Prompt tokens that another request is writing just now and that a waiting one can copy a few rounds later."""
_NOT_FOLLOWED = "The response_format of this request is too complex to follow; simplify its schema."
_FAILED = "The server failed on this request; others were not touched. Send it again, or report it with its id."


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
        prior: float = DEFAULT_PRIOR,
        text_stream: Callable[[Sequence[str]], TextStream] | None = None,
    ) -> None:
        """`prior` is the acceptance expected of the first draft. `text_stream` makes what finds stop strings; without it
        requests with stop strings are refused. Slots of `target` past config.max_num_seqs keep prefixes of finished requests.
        """
        self.config = config
        self.speculation = speculation
        self.events = events
        self.eos_token_ids = frozenset(eos_token_ids)
        self.target_fingerprint = target_fingerprint
        self.trace_sink = trace_sink
        self.scheduler = Scheduler(config)
        self.runner = Runner(target)
        self.prefixes = PrefixCache(
            first_slot=config.max_num_seqs, num_slots=max(0, target.num_slots - config.max_num_seqs)
        )
        if costs is None:
            starting("Timing the model's passes, from which draft lengths are chosen: a few seconds ...")
        self.costs = costs or self.runner.measure_costs(draft)
        self.estimate = PlainEstimate(self.costs)
        self.drafting = self.new_drafting(draft, prior)
        self.stats = SpeculationStats()
        self.reads_together = target.device.type == "cuda"
        """Whether reading a number back is dear, so that some are computed that may not be needed."""
        self._traced: list[tuple[RequestState, TracedRound]] = []
        self.stats_by_version: dict[tuple[str, str], SpeculationStats] = {}
        """By (route whose draft it was, version): what each version's own proposals came to."""
        self._text_stream = text_stream
        self._forgets_prefixes = False
        self.traffic: dict[str, Traffic] = {}
        """By route: finished requests' texts, to find suffixes in."""
        self.max_traffic_age_seconds = float("inf")
        self._offered_texts: list[tuple[str, Traffic]] = []

    # --- what callers use -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> RequestState:
        """Queue a request. Raises ValueError as `check` does."""
        self.check(request)
        state = RequestState.from_request(request)
        target = self.runner.target
        self.drafting.assign(state)
        state.draft_version_at_arrival = state.draft_version = self.drafting.version_for(state)
        state.prefix = PrefixState.of(request, target.vocabulary_size, target.device)
        if request.sampling.stop and self._text_stream is not None:
            state.text = self._text_stream(request.sampling.stop)
        if request.prediction_token_ids:
            state.prediction = Prediction(request.prediction_token_ids)
        if self.drafting.uses_suffixes:
            state.suffix = SuffixMatcher(
                traffic=self._traffic_of(request), client_key=request.client_key,
                longest=self.speculation.num_speculative_tokens or self.speculation.max_num_speculative_tokens,
            )  # fmt: skip
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
            raise ContextTooLongError(
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together they pass the limit of "
                f"{self.config.max_model_len}. Shorten the prompt or lower max_tokens."
            )
        vocabulary_size = self.runner.target.vocabulary_size
        biased = [token for token, _ in request.sampling.logit_bias]
        for name, token_ids in {
            "prompt": request.prompt_token_ids,
            "logit_bias": biased,
            "prediction": request.prediction_token_ids,
        }.items():
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
                raise ValueError(f"The {name} holds token ids outside 0..{vocabulary_size - 1}.")
        if len(request.prediction_token_ids) > self.config.max_model_len:
            raise ValueError(
                f"prediction has {len(request.prediction_token_ids)} tokens, more than the {self.config.max_model_len} that "
                "prompt and output can have together."
            )
        if request.sampling.stop and self._text_stream is None:
            raise ValueError("stop needs a tokenizer, and this engine has none; use stop_token_ids.")
        if request.grammar is not None and request.sampling.ignore_eos:
            raise ValueError("ignore_eos and response_format exclude each other: a finished document ends the output.")

    def cancel(self, request_id: str) -> RequestState | None:
        """End a request now, running or waiting; None when there is no such one (any more)."""
        for state in [*self.scheduler.running, *self.scheduler.waiting]:
            if state.request.id == request_id:
                self._finish(state, "cancelled")
                return state
        return None

    def round(self) -> list[RequestState]:
        """`step`, and when it raises: none of the requests that ran can be trusted, those that wait can. Raises nothing."""
        try:
            return self.step()
        except Exception as error:  # whatever a model or a kernel raises
            logger.exception("A round failed; its requests are answered with an error.")
            self.events.emit("round_failed", reason=f"{type(error).__name__}: {error}")
            failed = list(self.scheduler.running)
            self._traced = []
            for state in failed:
                state.error = _FAILED
                self._finish(state, "error")
            return failed

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def new_drafting(
        self,
        draft: DraftModel | None,
        prior: float = DEFAULT_PRIOR,
        *,
        uses_suffixes: bool | None = None,
        num_speculative_tokens: int | None = None,
    ) -> Drafting:
        """What decides who drafts; assigned to `drafting` it takes over, with nothing learnt yet. `uses_suffixes` and a fixed
        `num_speculative_tokens`: None is as the settings have it."""
        fixed = num_speculative_tokens
        speculation = self.speculation if fixed is None else replace(self.speculation, num_speculative_tokens=fixed)
        made = Drafting(
            draft, runner=self.runner, speculation=speculation, costs=self.costs, events=self.events, prior=prior
        )
        made.uses_suffixes = made.uses_suffixes if uses_suffixes is None else uses_suffixes
        return made

    @property
    def draft(self) -> DraftModel | None:
        """In service."""
        return self.drafting.service.draft if self.drafting.service else None

    @property
    def draft_version(self) -> str:
        """The version really served, not the one the registry names."""
        return self.drafting.version

    def offer_draft(self, draft: DraftModel | None, prior: float | None = None) -> None:
        """From any thread: this draft alone from the next round on. `prior` is its expected acceptance."""
        self.drafting.offer(Lineup(service=draft, prior=prior))

    def take_up_offered_draft(self) -> None:
        """Between two rounds, on the engine's own thread."""
        self.drafting.take_up_offer([*self.scheduler.running, *self.scheduler.waiting])

    def forget_prefixes(self) -> None:
        """From any thread: nothing that requests up to now wrote is reused by later ones, from the next round on."""
        self._forgets_prefixes = True

    def offer_texts(self, route: str, texts: Traffic) -> None:
        """From any thread: texts of an earlier process, as older than all that the route's suffixes are found in so far."""
        self._offered_texts.append((route, texts))

    def new_traffic(self) -> Traffic:
        """Empty, with this engine's limits."""
        return Traffic(
            self.speculation.suffix_traffic_tokens,
            is_per_client=self.config.isolation == "client",
            max_age_seconds=self.max_traffic_age_seconds,
        )

    def _traffic_of(self, request: Request) -> Traffic:
        """Routes without a draft of their own share the default one's, and a new one starts with a copy of it: its stream was
        served there."""
        route = self.drafting.route_of(request)
        if route not in self.traffic:  # not setdefault: an empty one is megabytes
            default = self.traffic.get(DEFAULT_ROUTE)
            self.traffic[route] = default.copied() if default is not None else self.new_traffic()
        return self.traffic[route]

    def expect_texts(self, routes: Iterable[str]) -> None:
        """Before serving: these routes' own texts are on their way (`offer_texts`), so none starts with a copy."""
        for route in routes:
            if route not in self.traffic:
                self.traffic[route] = self.new_traffic()

    @torch.inference_mode()
    def step(self) -> list[RequestState]:
        """One round: propose, verify, commit. Returns the requests that finished in it."""
        self.take_up_offered_draft()
        self._admit()
        entries = self.scheduler.plan_round()
        if not entries:
            return []
        proposals = self.drafting.proposals(entries)
        num_emitted = self.stats.num_emitted_tokens
        target_logits = self.runner.verify(entries, proposals)
        for entry in entries:
            if entry.state.trace is not None:
                entry.state.trace.take_in()  # of the round before, while a GPU works on this one
        verdicts = self._verdicts(entries, proposals, target_logits)
        for parts in zip(entries, proposals, target_logits, verdicts, strict=True):
            self._commit(*parts)
        self.estimate.record(entries, proposals, self.stats.num_emitted_tokens - num_emitted)
        self._record_traces()
        return self._release_finished(entries)

    # --- the parts of a round ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Waiting requests into free slots, each with the longest beginning that some slot already holds."""
        if self._forgets_prefixes:
            self._forgets_prefixes = False
            self._offered_texts.clear()
            for state in (*self.scheduler.running, *self.scheduler.waiting):
                state.leaves_nothing = True  # whose they are is not known here
            for traffic in self.traffic.values():
                traffic.forget()
            for slot in self.prefixes.forget():
                self.runner.target.clear_slot(slot)
        while self._offered_texts:
            route, texts = self._offered_texts.pop()
            self.expect_texts([route])
            self.traffic[route].take_over(texts)
        for state in self.scheduler.admit(self._should_wait):
            if state.suffix is not None:
                state.suffix.start(state.token_ids, state.request.sampling.max_tokens)
            others = [
                (s.slot, s.token_ids[: s.target_length])
                for s in self.scheduler.running
                if s is not state and self._may_share(s, state)
            ]
            source, num_tokens = self.prefixes.find(state.token_ids, others, self._owner(state))
            if source < 0:
                continue
            self.runner.target.copy_slot(source, state.slot, num_tokens)
            state.target_length = state.num_cached_tokens = num_tokens
            self.drafting.adopt(source, state.slot, num_tokens)

    def _owner(self, state: RequestState) -> str | None:
        """Whose what this request leaves behind is; None is everybody's."""
        return state.request.client_key if self.config.isolation == "client" else None

    def _may_share(self, one: RequestState, other: RequestState) -> bool:
        return self._owner(one) is None or (self._owner(one) == self._owner(other) != "")

    def _should_wait(self, state: RequestState) -> bool:
        """Another request is just writing a beginning this one could copy."""
        for other in self.scheduler.running:
            if other.num_pending > 1 and self._may_share(other, state):
                written = other.target_length
                needed = max(_WORTH_WAITING_FOR, written + 1)
                if len(state.token_ids) > needed and state.token_ids[:needed] == other.token_ids[:needed]:
                    return True
        return False

    def _verdicts(
        self, entries: list[RoundEntry], proposals: list[Proposal | None], target_logits: list[torch.Tensor]
    ) -> list[Verdict | None]:
        """None for a request whose prompt is still being written, or that failed. Greedy ones share one argmax over all
        rows; `verify` is its slow twin."""
        best_logits, choices = best_tokens(target_logits)  # on a GPU this is where the host waits, once a round
        for one in proposals:
            if one is not None:
                one.settle()
        drawn = self._drawn_together(entries, proposals, target_logits) if self.reads_together else {}
        verdicts: list[Verdict | None] = []
        end = 0
        for index, (entry, proposal, logits_RV) in enumerate(zip(entries, proposals, target_logits, strict=True)):
            start, end = end, end + logits_RV.shape[0]
            if end == start:
                verdicts.append(None)
                continue
            try:
                _require_finite(best_logits[start:end])
                verdict = drawn.get(index) or self._verdict(entry.state, proposal, logits_RV, choices[start:end])
                verdicts.append(verdict)
            except Exception as error:  # this request's own numbers or grammar; the others go on
                self._fail(entry.state, error)
                verdicts.append(None)
        return verdicts

    @staticmethod
    def _drawn_together(
        entries: list[RoundEntry], proposals: list[Proposal | None], target_logits: list[torch.Tensor]
    ) -> dict[int, Verdict]:
        """By place: of requests drawn at a temperature without a seed. Where one's numbers fail, each is judged alone."""
        chosen = [
            index
            for index, entry in enumerate(entries)
            if entry.is_decoding and entry.state.prefix is None and entry.state.request.sampling.is_unseeded
        ]
        cases = [
            (target_logits[i], proposals[i], state.request.sampling, state.seed, state.num_output_tokens)
            for i, state in ((i, entries[i].state) for i in chosen)
        ]
        with contextlib.suppress(Exception):
            return dict(zip(chosen, verify_together(cases), strict=True))
        return {}

    @staticmethod
    def _verdict(
        state: RequestState, proposal: Proposal | None, logits_RV: torch.Tensor, choices_R: list[int]
    ) -> Verdict:
        sampling, drafted = state.request.sampling, proposal.draft_token_ids if proposal else []
        if state.prefix is None and sampling.is_greedy:
            return verify_exact(choices_R, drafted)
        if state.prefix is not None:
            logits_RV = state.prefix.adjust(logits_RV, drafted)
            _require_finite(logits_RV.amax(-1).tolist())  # something must be allowed
        return verify(logits_RV, proposal, sampling, state.seed, state.num_output_tokens)

    def _commit(
        self, entry: RoundEntry, proposal: Proposal | None, logits_RV: torch.Tensor, verdict: Verdict | None
    ) -> None:
        """Append the verdict's tokens, trimmed where the request ends, with all that runs parallel; rewind the caches."""
        state = entry.state
        if state.finish_reason is not None:
            return  # failed in this round
        if verdict is None:
            state.target_length += entry.num_pending_rows
            return
        try:
            output = state.trim(verdict.output_token_ids, self.eos_token_ids)
            num_accepted = min(verdict.num_accepted, len(output))
            self._append(state, output, logits_RV)
            self._count(state, proposal, verdict, num_accepted, len(output))
            if state.trace is not None:
                traced = TracedRound(
                    trace=state.trace,
                    target_logits_RV=logits_RV,
                    proposal=proposal,
                    num_accepted=num_accepted,
                    num_committed=len(output),
                    is_cut=len(output) < len(verdict.output_token_ids),
                    first_position=state.num_output_tokens - len(output),
                    round_number=state.num_rounds - 1,
                )
                self._traced.append((state, traced))
        except Exception as error:  # of this request's own making; the others go on
            self._fail(state, error)

    def _record_traces(self) -> None:
        """Of all that was committed in the round. What fails here costs traces, never an answer."""
        traced, self._traced = self._traced, []
        try:
            record_rounds([one for _, one in traced])
        except Exception as error:
            logger.exception("A round's traces could not be kept.")
            self.events.emit("traces_failed", reason=f"{type(error).__name__}: {error}")
            for state, _ in traced:
                state.trace = None

    def _append(self, state: RequestState, output: list[int], logits_RV: torch.Tensor) -> None:
        sampling = state.request.sampling
        state.token_ids.extend(output)
        state.target_length = len(state.token_ids) - 1
        self.drafting.commit(state.slot, state.target_length)
        if state.prefix is not None:
            state.prefix.commit(output)
        if state.prediction is not None:
            state.prediction.commit(output)
        if state.suffix is not None:
            state.suffix.commit(output)
        if sampling.logprobs is not None:
            state.logprobs += raw_logprobs(logits_RV, output, sampling.logprobs)
        state.num_rounds += 1

    def _count(
        self, state: RequestState, proposal: Proposal | None, verdict: Verdict, num_accepted: int, num_emitted: int
    ) -> None:
        """A prediction is the client's: its counts are kept apart from the draft's."""
        num_drafted = len(proposal.draft_token_ids) if proposal else 0
        state.round_num_drafted, state.round_num_accepted = num_drafted, num_accepted
        state.round_proposer = proposal.draft_version if proposal and num_drafted else None
        is_prediction = proposal is not None and proposal.draft_version == PREDICTION
        by_draft = (0, 0) if is_prediction else (num_drafted, num_accepted)
        for stats in (state.stats, self.stats):
            stats.record(num_drafted=by_draft[0], num_accepted=by_draft[1], num_emitted=num_emitted)
        if proposal is None or num_drafted == 0:
            return
        route = self.drafting.route_of(state.request)
        own = self.stats_by_version.setdefault((route, proposal.draft_version), SpeculationStats())
        own.record(num_drafted=num_drafted, num_accepted=num_accepted, num_emitted=num_emitted)
        if is_prediction:
            state.num_prediction_tokens += num_drafted
            state.num_accepted_prediction_tokens += num_accepted
            return
        if proposal.draft_version == SUFFIX:
            return  # says nothing about the draft
        if proposal.draft_version not in state.counted_versions:
            state.counted_versions.add(proposal.draft_version)
            own.num_requests += 1
        state.draft_version = proposal.draft_version
        self.drafting.record(state, proposal, num_drafted, verdict.num_accepted)

    # --- the end of a request ---------------------------------------------------------------------------------------

    def _fail(self, state: RequestState, error: Exception) -> None:
        """Mark a request as failed in the middle of a round; it is released with the round's finished ones."""
        logger.exception("Request %s failed.", state.request.id, exc_info=error)
        self.events.emit("request_failed", request=state.request.id, reason=f"{type(error).__name__}: {error}")
        is_grammar = isinstance(error, GrammarError)
        state.finish_reason, state.error = "error", _NOT_FOLLOWED if is_grammar else _FAILED

    def _release_finished(self, entries: list[RoundEntry]) -> list[RequestState]:
        finished = [entry.state for entry in entries if entry.state.finish_reason]
        for state in finished:
            assert state.finish_reason is not None
            self._finish(state, state.finish_reason)
        return finished

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        """Free the slot; before, keep its beginning for later requests and hand the trace over, as far as that succeeds."""
        state.finish_reason = reason
        try:
            if reason == "error":
                self._clear_slot(state)
            else:
                if not state.leaves_nothing:
                    self._keep_prefix(state)
                    self._keep_text(state)
                self._hand_trace_over(state)
        except Exception as error:  # its answer is complete; what fails here is for later requests only
            logger.exception("The end of request %s failed.", state.request.id)
            self.events.emit("finish_failed", request=state.request.id, reason=f"{type(error).__name__}: {error}")
        self.scheduler.release(state)
        self.drafting.finish(state)
        if state.slot >= 0:
            self.drafting.release(state.slot)

    def _hand_trace_over(self, state: RequestState) -> None:
        if state.trace is not None and self.trace_sink is not None and state.num_output_tokens > 0:
            self.trace_sink(state.trace.finish(state, self.target_fingerprint))

    def _clear_slot(self, state: RequestState) -> None:
        """What made it fail may be numbers that are none; they must not stay in the caches."""
        if state.slot >= 0:
            self.runner.target.clear_slot(state.slot)
            self.drafting.clear_slot(state.slot)

    def _keep_prefix(self, state: RequestState) -> None:
        written = state.token_ids[: state.target_length]
        owner = self._owner(state)
        kept = self.prefixes.reserve(written, owner) if state.slot >= 0 and owner != "" else None
        if kept is None:
            return
        try:
            self.runner.target.copy_slot(state.slot, kept, len(written))
            self.drafting.adopt(state.slot, kept, len(written))
        except Exception:
            self.prefixes.give_back(kept)
            raise
        self.prefixes.keep(kept, written, owner)

    def _keep_text(self, state: RequestState) -> None:
        """For suffixes of later requests. What is held out of learning is held out here too, and what must not be stored."""
        request = state.request
        if state.suffix is None or not request.store or is_held_out(request.conversation_key):
            return
        if self.speculation.suffix_traffic_tokens and state.num_output_tokens and self._owner(state) != "":
            state.suffix.traffic.add(state.token_ids, request.client_key)


def _require_finite(best_logits_R: list[float]) -> None:
    """Each row's largest logit. NaN or no allowed token at all: there is nothing to choose from."""
    if not all(math.isfinite(best) for best in best_logits_R):
        raise ArithmeticError("the target gave no finite logit for a token that is allowed")
