"""What the engine asks of anything that suggests tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from livedraft.records import Proposal, SamplingParams
from livedraft.speculation.prefix import PrefixState


@dataclass(frozen=True, kw_only=True)
class ProposalTask:
    """One request's turn: its slot, its committed tokens, and how many tokens are wanted at most."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    num_tokens: int
    stop_below: tuple[float, ...] = ()
    """After keeping each token: stop once the chance that all tokens so far and the next one are accepted falls below this;
    none never stops."""
    prefix: PrefixState | None = None
    """Penalties, bias and grammar of the request, to be applied to the draft as to the target."""
    chances_of: Callable[[float], tuple[float, float]] = lambda confidence: (confidence, 1.0)
    """From the draft's own probability of a token: the chance that it is accepted, and that then the next one is."""


class Proposer(Protocol):
    version: str

    def propose(self, tasks: list[ProposalTask]) -> list[Proposal]:
        """One proposal a task, possibly empty (a request whose cache is still catching up)."""

    def propose_ahead(self, tasks: list[ProposalTask]) -> list[Proposal]:
        """As `propose`, but drafted tokens may stay on the device until the verdict (`Proposal.settle`)."""

    def commit(self, slot: int, num_valid_tokens: int) -> None:
        """The first `num_valid_tokens` of the slot's sequence stand; whatever was written past them is forgotten."""

    def release(self, slot: int) -> None:
        """The slot's request is gone."""
