"""One request's life in the engine: waiting -> running -> finished, and what it returns."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

from livedraft.engine.tracing import TraceBuilder
from livedraft.records import Request
from livedraft.speculation.stats import SpeculationStats

FinishReason = Literal["stop", "length"]


@dataclass(kw_only=True)
class RequestState:
    """Mutable. Invariant between rounds of a running request: target_length = len(token_ids) - 1, so the last
    committed token is the first row of its next pass; a smaller target_length means prompt is still to be written."""

    request: Request
    token_ids: list[int]
    slot: int = -1
    target_length: int = 0
    finish_reason: FinishReason | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    """The request's own seed, or a private one: randomness is by counter either way."""
    draft_version_at_arrival: str = "none"
    arrived_at: float = field(default_factory=time.time)
    first_token_at: float | None = None
    finished_at: float | None = None
    num_rounds: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    trace: TraceBuilder | None = None

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
