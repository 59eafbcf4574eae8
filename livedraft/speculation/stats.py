"""Counters of speculation and the numbers made of them, each defined once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class SpeculationStats:
    num_drafts: int = 0
    """Request-rounds with at least one drafted token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_by_accepted: list[int] = field(default_factory=list)
    """How many drafts had 0, 1, 2 ... tokens accepted."""
    num_target_passes: int = 0
    """Request-rounds that emitted tokens, k = 0 included."""
    num_emitted_tokens: int = 0
    num_requests: int = 0
    """With at least one drafted round; counted in the statistics of a version only."""

    def record(self, *, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        self.num_target_passes += 1
        self.num_emitted_tokens += num_emitted
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for counts, length in (
            (self.num_accepted_tokens_per_pos, num_drafted),
            (self.num_drafts_by_accepted, num_accepted + 1),
        ):
            counts.extend([0] * max(0, length - len(counts)))
        self.num_drafts_by_accepted[num_accepted] += 1
        for position in range(num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def num_first_accepted(self) -> int:
        """Rounds whose first drafted token was accepted: the one position every draft length has."""
        return self.num_accepted_tokens_per_pos[0] if self.num_accepted_tokens_per_pos else 0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds over rounds with k >= 1, bonus included; None when there were none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def block_efficiency(self) -> float | None:
        """Emitted tokens / target passes, all rounds."""
        return self.num_emitted_tokens / self.num_target_passes if self.num_target_passes else None
