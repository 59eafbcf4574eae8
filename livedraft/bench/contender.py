"""One engine, several ways to answer: the same weights and cache, another draft."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from livedraft.engine.prefix_cache import PrefixCache
from livedraft.llm import LLM
from livedraft.records import SamplingParams
from livedraft.speculation.draft_model import DraftModel
from livedraft.speculation.stats import SpeculationStats
from livedraft.speculation.suffix import Traffic


@dataclass(kw_only=True)
class Decoding:
    """One answer past its first token, so without its prompt."""

    seconds: float = 0.0
    num_tokens: int = 0
    drafted_by_round: list[int] = field(default_factory=list)
    """Drafted tokens of each round."""


def decoding_ratios(own: Sequence[Decoding], baseline: Sequence[Decoding]) -> list[float]:
    """Tokens a second over the baseline's, answer by answer, prompts not counted; answers of one token are left out."""
    return [
        one.num_tokens / one.seconds / (other.num_tokens / other.seconds)
        for one, other in zip(own, baseline, strict=True)
        if one.drafted_by_round and other.drafted_by_round
    ]


class Contender:
    """Answers tokenised prompts, leaves nothing to the others, and counts its own speculation."""

    def __init__(
        self,
        llm: LLM,
        draft: str | DraftModel | None,
        sampling: SamplingParams,
        *,
        uses_suffixes: bool = False,
        keeps_traffic: bool = False,
        earlier_texts: Mapping[str, Traffic] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        """`draft`: None decodes without one; a version is looked for as `LLM.resident_draft` does. What a draft is worth is
        measured without suffixes, unless they are asked for, and with the length that costs choose, unless it is fixed.
        `keeps_traffic`: suffixes are looked for in this contender's own earlier answers too, as a server does, and in
        `earlier_texts`, by route."""
        if isinstance(draft, str):
            draft = llm.resident_draft(draft)
        self._llm, self._sampling = llm, sampling
        self._drafting = llm.engine.new_drafting(
            draft, llm.prior_of(draft), uses_suffixes=uses_suffixes, num_speculative_tokens=num_speculative_tokens
        )
        self._no_reuse = PrefixCache(first_slot=0, num_slots=0)  # the same prompt comes again for every contender
        self._keeps_traffic = keeps_traffic
        self._earlier_texts = earlier_texts or {}
        self._traffic = self._fresh_traffic()
        self.stats = SpeculationStats()
        self.decodings: list[Decoding] = []
        """One for each prompt answered alone."""

    @property
    def draft(self) -> DraftModel | None:
        return self._drafting.service.draft if self._drafting.service else None

    def _fresh_traffic(self) -> dict[str, Traffic]:
        return {route: texts.copied() for route, texts in self._earlier_texts.items()}

    def forget_counts(self) -> None:
        """What was answered so far was warming up; what was learnt of the draft stays, what was kept of
        the texts does not."""
        self.stats, self.decodings = SpeculationStats(), []
        self._traffic = self._fresh_traffic()

    @property
    def num_speculative_tokens(self) -> int:
        """What the cost model chooses at batch 1 after what was seen."""
        return self._drafting.service.lengths.best(1) if self._drafting.service else 0

    def __call__(self, prompt: list[int]) -> list[int]:
        return self.together([prompt])[0]

    def together(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Answers to prompts that are served at once."""
        engine = self._llm.engine
        before = engine.drafting, engine.stats, engine.prefixes, engine.traffic
        engine.drafting, engine.stats, engine.traffic = self._drafting, self.stats, self._traffic
        engine.prefixes = self._no_reuse
        try:
            return self._answers(prompts)
        finally:
            engine.drafting, engine.stats, engine.prefixes, engine.traffic = before

    def _answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        states = self._llm.add(
            [self._llm.request(prompt, self._sampling, store=self._keeps_traffic) for prompt in prompts]
        )
        first, decoding = states[0], Decoding()
        started, seen = 0.0, (0, 0)

        def note() -> None:
            nonlocal started, seen
            tokens, drafted = first.num_output_tokens, first.stats.num_draft_tokens
            if started:
                decoding.seconds = time.perf_counter() - started
                decoding.num_tokens += tokens - seen[0]
                decoding.drafted_by_round.append(drafted - seen[1])
            elif tokens:
                started = time.perf_counter()
            seen = tokens, drafted

        if len(prompts) == 1:
            self._llm.run(note)
            self.decodings.append(decoding)
        else:
            self._llm.run()
        return [self._llm.output(state).token_ids for state in states]
