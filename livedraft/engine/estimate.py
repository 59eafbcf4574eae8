"""What speculation is worth just now, where nobody decodes the same requests plainly to compare with.

Both sides come from the passes timed at start: what the rounds should have cost as they were, and what plain decoding of the
same tokens should have cost. Their ratio is an estimate, and whoever shows it says so: it takes overhead and a busy machine to
stretch both alike, and leaves out what writing a draft's lagging cache costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from livedraft.engine.scheduler import RoundEntry
from livedraft.records import Proposal
from livedraft.speculation.draft_length import CostModel
from livedraft.speculation.prediction import VERSION as PREDICTION
from livedraft.speculation.suffix import VERSION as SUFFIX


class PlainEstimate:
    """Two counters that only grow; `plain_seconds / seconds` between two readings is the speed-up."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.seconds = 0.0
        """Of the rounds as they were."""
        self.plain_seconds = 0.0
        """Of the same tokens, one a request and pass. Prompts cost the same either way."""

    def record(self, entries: Sequence[RoundEntry], proposals: Sequence[Proposal | None], num_emitted: int) -> None:
        target = self._costs.target_seconds
        num_rows = num_decoding = num_verified = num_drafting = longest = 0
        for entry, proposal in zip(entries, proposals, strict=True):
            num_rows += entry.num_pending_rows
            num_decoding += entry.is_decoding
            if proposal is None:
                continue
            num_verified += len(proposal.draft_token_ids)
            if proposal.draft_version not in (PREDICTION, SUFFIX):
                num_drafting += 1
                longest = max(longest, len(proposal.draft_token_ids))
        self.seconds += target(num_rows + num_verified)
        if num_drafting:
            self.seconds += longest * self._costs.draft_step_seconds(num_drafting)
        self.plain_seconds += target(num_rows)
        if num_emitted > num_decoding:
            self.plain_seconds += (num_emitted - num_decoding) * target(num_decoding) / num_decoding
