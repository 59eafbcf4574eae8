"""The versions a trainer judges with: the weights of late ones, and what each came to on which request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import DraftWeights
from livedraft.learning.batches import Example
from livedraft.learning.scoring import Score
from livedraft.records import DraftVersion, UserError

MAX_KEPT_SCORES = 4000
"""Of one version."""
_MAX_KEPT_DRAFTS = 4


class Versions:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._weights: OrderedDict[str, DraftWeights] = OrderedDict()
        self._scores: dict[str, dict[int, Score]] = {}  # by version and trace

    def weights(self, version_id: str, *, in_service: str) -> DraftWeights | None:
        """None where they are damaged, pruned, or of no version at all."""
        if version_id not in self._weights:
            try:
                manifest = self._registry.manifest(version_id)
                self.keep(version_id, self._registry.load(DraftVersion(**manifest)), in_service=in_service)
            except (UserError, TypeError):
                return None
        return self._weights[version_id]

    def keep(self, version_id: str, weights: DraftWeights, *, in_service: str) -> None:
        """Room is made by the oldest that does not serve."""
        self._weights[version_id] = weights
        while len(self._weights) > _MAX_KEPT_DRAFTS:
            oldest = next(name for name in self._weights if name != in_service)
            del self._weights[oldest]
            self._scores.pop(oldest, None)

    def scores(
        self, version_id: str, examples: Sequence[Example], score: Callable[[Sequence[Example]], list[Score]]
    ) -> list[Score]:
        """Each example's under a version; `score` is asked for those that are not known yet."""
        known = self._scores.setdefault(version_id, {})
        unknown = [example for example in examples if example.trace_id not in known]
        if unknown:
            known.update(zip((example.trace_id for example in unknown), score(unknown), strict=True))
        found = [known[example.trace_id] for example in examples]
        for trace_id in list(known)[: max(0, len(known) - MAX_KEPT_SCORES)]:
            del known[trace_id]
        return found

    def forget_all_but(self, trace_ids: Collection[int]) -> None:
        for scores in self._scores.values():
            for trace_id in [trace_id for trace_id in scores if trace_id not in trace_ids]:
                del scores[trace_id]
