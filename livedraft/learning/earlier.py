"""Traffic that is new may be old traffic come back: what served each earlier one at its end is tried again.

The drafts are in memory only, and gone when the training process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from livedraft.drafts.weights import DraftWeights
from livedraft.learning import gate
from livedraft.learning.batches import Example
from livedraft.learning.trainer import Trainer

MAX_EARLIER = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """A draft of earlier traffic that the gate prefers to what serves."""

    weights: DraftWeights
    decision: gate.GateDecision
    alpha: float


class EarlierDrafts:
    def __init__(self) -> None:
        self.drafts: dict[str, DraftWeights] = {}
        """By version, the latest last."""
        self.untried: list[DraftWeights] = []
        """To be tested on the traffic that is now."""

    def traffic_changed(self, version_id: str, served: DraftWeights) -> None:
        """All known ones are worth a test; what served until now is remembered for later."""
        self.untried = [weights for known, weights in self.drafts.items() if known != version_id]
        self.drafts.pop(version_id, None)
        self.drafts[version_id] = served
        while len(self.drafts) > MAX_EARLIER:
            del self.drafts[next(iter(self.drafts))]

    def best(
        self,
        evidence: Sequence[Example],
        parent_alphas: Sequence[float],
        trainer: Trainer,
        between: Callable[[], None],
        *,
        seed: int,
    ) -> Found | None:
        """The best of the untried ones that passes the gate against what serves, on what has come since the change."""
        num_positions = sum(example.num_positions for example in evidence)
        best: Found | None = None
        for number, weights in enumerate(self.untried, start=1):
            scores = trainer.score(evidence, weights, between)
            decision = gate.decide(
                [score.alpha_served for score in scores], list(parent_alphas), num_positions=num_positions,
                test_number=number, seed=seed,
            )  # fmt: skip
            if decision.promote and (best is None or decision.candidate_alpha > best.decision.candidate_alpha):
                alpha = sum(score.alpha for score in scores) / len(scores)
                best = Found(weights=weights, decision=decision, alpha=alpha)
        return best
