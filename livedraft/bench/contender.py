"""One engine, several ways to answer: the same weights and cache, another draft."""

from __future__ import annotations

from livedraft.engine.prefix_cache import PrefixCache
from livedraft.llm import LLM
from livedraft.records import SamplingParams
from livedraft.speculation.stats import SpeculationStats


class Contender:
    """Answers one tokenised prompt at a time, nothing stored, and counts its own speculation."""

    def __init__(self, llm: LLM, version: str | None, sampling: SamplingParams, *, uses_suffixes: bool = False) -> None:
        """`version` as `LLM.resident_draft` takes it; None decodes without a draft. What a draft is worth is measured without
        suffixes, unless they are asked for."""
        draft = llm.resident_draft(version) if version else None
        self._llm, self._sampling = llm, sampling
        self._drafting = llm.engine.new_drafting(draft, llm.prior_of(draft), uses_suffixes=uses_suffixes)
        self._no_reuse = PrefixCache(first_slot=0, num_slots=0)  # the same prompt comes again for every contender
        self.stats = SpeculationStats()

    @property
    def num_speculative_tokens(self) -> int:
        """What the cost model chooses at batch 1 after what was seen."""
        return self._drafting.service.lengths.best(1) if self._drafting.service else 0

    def __call__(self, prompt: list[int]) -> list[int]:
        return self.answer_all([prompt])[0]

    def answer_all(self, prompts: list[list[int]]) -> list[list[int]]:
        """All of them together."""
        engine = self._llm.engine
        before = engine.drafting, engine.stats, engine.prefixes
        engine.drafting, engine.stats = self._drafting, self.stats
        engine.prefixes = self._no_reuse
        try:
            outputs = self._llm.generate(prompts, self._sampling, store=False)
            return [output.token_ids for output in outputs]
        finally:
            engine.drafting, engine.stats, engine.prefixes = before
