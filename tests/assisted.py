"""Acceptance as `transformers` itself counts it in assisted generation: what its candidate generator proposes, and how much of
that the target keeps."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator


def acceptance_rate(target, assistant, prompts: Sequence[list[int]], *, k: int, max_tokens: int, eos: int) -> float:
    """Accepted / drafted over all prompts, greedy, `k` tokens a round."""
    assistant.generation_config.num_assistant_tokens = k
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # or it stops early where the draft is unsure
    drafted, accepted = [], []
    propose, conclude = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy

    def counted_propose(self, input_ids, **options):
        candidates = propose(self, input_ids, **options)
        drafted.append(candidates[0].shape[1] - input_ids.shape[1])
        return candidates

    def counted_conclude(self, input_ids, scores, num_matches):
        accepted.append(int(num_matches))
        return conclude(self, input_ids, scores, num_matches)

    with (
        mock.patch.object(AssistedCandidateGenerator, "get_candidates", counted_propose),
        mock.patch.object(AssistedCandidateGenerator, "update_candidate_strategy", counted_conclude),
    ):
        for prompt in prompts:
            target.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=max_tokens, assistant_model=assistant, eos_token_id=eos, pad_token_id=eos,
            )  # fmt: skip
    assert len(drafted) == len(accepted) > 0
    assert max(drafted) == k
    return sum(accepted) / sum(drafted)
