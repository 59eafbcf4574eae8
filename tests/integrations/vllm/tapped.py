"""A tapped request small enough to hold in the head."""

import torch

from livedraft.integrations.vllm.wire import TappedRequest

SAMPLING = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "max_tokens": 16, "ignore_eos": False,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [9],
}  # fmt: skip


def tapped(id: str = "cmpl-livedraft-" + "0" * 32 + "-0-ab", output: tuple = (4, 5, 6), **fields) -> TappedRequest:
    """The first token alone, then a round that drafted 5, 7 and 8: 5 is accepted, 7 is not."""
    T, K = len(output), 4
    return TappedRequest(
        **{
            "id": id,
            "sampling": SAMPLING,
            "draft_version": "v1",
            "prompt_token_ids": torch.tensor([1, 2], dtype=torch.int32),
            "output_token_ids_T": torch.tensor(output, dtype=torch.int32),
            "teacher_token_ids_TK": torch.arange(T * K, dtype=torch.int32).view(T, K),
            "teacher_log_probs_TK": torch.full((T, K), -2.0, dtype=torch.float16),
            "tail_mass_T": torch.full((T,), 0.25),
            "round_number_T": torch.tensor([0, *[1] * (T - 1)], dtype=torch.int32),
            "version_T": ["none", *["v1"] * (T - 1)],
            "drafted_position_P": torch.tensor([1, 2, 3], dtype=torch.int32),
            "drafted_token_id_P": torch.tensor([5, 7, 8], dtype=torch.int32),
            "drafted_log_prob_P": torch.tensor([-0.5, -1.0, -1.5]),
            "drafted_target_log_prob_P": torch.tensor([-0.1, -3.0, -4.0]),
            "drafted_accepted_P": torch.tensor([True, False, False]),
            "drafted_off_path_P": torch.tensor([False, False, True]),
            **fields,
        }
    )
