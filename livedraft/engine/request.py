"""One request's life in the engine: waiting -> running -> finished, and what it returns."""

from __future__ import annotations

import secrets
import time
from collections.abc import Set
from dataclasses import dataclass, field

from livedraft.engine.tracing import TraceBuilder
from livedraft.records import FinishReason, Request, RequestCounts, TokenLogprobs
from livedraft.speculation.own_acceptance import OwnAcceptance, WrittenPrompt
from livedraft.speculation.prediction import Prediction
from livedraft.speculation.prefix import PrefixState
from livedraft.speculation.stats import SpeculationStats
from livedraft.speculation.suffix import SuffixMatcher
from livedraft.tokenizer import TextStream


@dataclass(kw_only=True, eq=False)
class RequestState:
    """Mutable. Invariant between rounds of a running request: target_length = len(token_ids) - 1, so the last
    committed token is the first row of its next pass; a smaller target_length means prompt is still to be written."""

    request: Request
    token_ids: list[int]
    slot: int = -1
    target_length: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for end-of-sequence."""
    error: str | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    """The request's own seed, or a private one: randomness is by counter either way."""
    draft_version_at_arrival: str = "none"
    draft_version: str = "none"
    """Of its last drafted round; that at arrival until there is one."""
    counted_versions: set[str] = field(default_factory=set)
    """Those that have drafted for it."""
    is_on_second: bool = False
    """Served by the second draft of a comparison instead of the one in service."""
    arrived_at: float = field(default_factory=time.time)
    admitted_at: float | None = None
    num_rounds: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    trace: TraceBuilder | None = None
    prefix: PrefixState | None = None
    """Penalties, bias, grammar; None for a request without them."""
    text: TextStream | None = None
    """Only with stop strings: they are found here, inside the round that completes them."""
    prediction: Prediction | None = None
    suffix: SuffixMatcher | None = None
    own_acceptance: OwnAcceptance = field(default_factory=OwnAcceptance)
    """Of the drafts' proposals for it."""
    written_prompt: WrittenPrompt | None = None
    is_prompt_refused: bool = False
    """It was not worth writing into the draft's cache."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One an output token, where the request asks for them."""
    num_cached_tokens: int = 0
    is_past_draft_limit: bool = False
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    round_num_drafted: int = 0
    round_num_accepted: int = 0
    round_proposer: str | None = None
    """Of the last round, for whoever shows tokens by where they come from."""
    leaves_nothing: bool = False
    """Somebody's traces were deleted while it ran: neither its text nor its keys and values are kept for later requests."""
    num_delivered: int = 0
    """Output tokens already handed over by the serving loop."""

    @classmethod
    def from_request(cls, request: Request) -> RequestState:
        state = cls(request=request, token_ids=list(request.prompt_token_ids))
        if request.sampling.seed is not None:
            state.seed = request.sampling.seed
        return state

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending(self) -> int:
        """Committed tokens the target's cache does not hold yet."""
        return len(self.token_ids) - self.target_length

    def trim(self, output: list[int], eos_token_ids: Set[int]) -> list[int]:
        """Cut new tokens where the request ends, inside an accepted block too, and set `finish_reason` and `stop_reason`.

        A stop within max_tokens wins over the length; end-of-sequence and stop tokens are kept, as is the token that
        completes a stop string.
        """
        sampling = self.request.sampling
        for index, token in enumerate(output):
            if token in sampling.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif (token in eos_token_ids and not sampling.ignore_eos) or self._completes_stop_string(token):
                self.finish_reason = "stop"
            elif self.num_output_tokens + index + 1 == sampling.max_tokens:
                self.finish_reason = "stop" if self._ends_in_stop_string() else "length"
            if self.finish_reason is not None:
                return output[: index + 1]
        return output

    def _ends_in_stop_string(self) -> bool:
        """In text that was held back because a character of it is not complete."""
        if self.text is None:
            return False
        self.text.finish()
        self.stop_reason = self.text.stopped_by
        return self.stop_reason is not None

    def _completes_stop_string(self, token: int) -> bool:
        if self.text is None:
            return False
        self.text.push([token])
        self.stop_reason = self.text.stopped_by
        return self.stop_reason is not None

    def counts(self) -> RequestCounts:
        return RequestCounts(
            num_drafts=self.stats.num_drafts,
            num_draft_tokens=self.stats.num_draft_tokens,
            num_accepted_tokens=self.stats.num_accepted_tokens,
            acceptance_histogram=tuple(self.stats.num_drafts_by_accepted),
            num_target_passes=self.stats.num_target_passes,
            num_emitted_tokens=self.stats.num_emitted_tokens,
            num_prediction_tokens=self.num_prediction_tokens,
            num_accepted_prediction_tokens=self.num_accepted_prediction_tokens,
            num_cached_prompt_tokens=self.num_cached_tokens,
            draft_version=self.draft_version,
            queued_seconds=(self.admitted_at or time.time()) - self.arrived_at,
        )
