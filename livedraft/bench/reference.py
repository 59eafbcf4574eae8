"""transformers as the independent reference, for logits (tests) and speed (bench)."""

from __future__ import annotations

from typing import Any

import torch

from livedraft.models.config import ModelConfig, hf_config


def transformers_model(tensors: dict[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype) -> Any:
    """transformers' model class with our tensors: the independent reference for logits and speed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = hf_config(config)
    as_hf = AutoConfig.for_model(raw.pop("model_type"), **raw, dtype=dtype)
    with torch.device("meta"):  # no random initialisation of weights that are replaced at once
        hf_model = AutoModelForCausalLM.from_config(as_hf)
    hf_model.to_empty(device="cpu")
    missing, unexpected = hf_model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    hf_model.tie_weights()
    fresh = type(hf_model.model.rotary_emb)(as_hf)  # its buffers are computed, not loaded
    hf_model.model.rotary_emb = fresh
    return hf_model.to(dtype).eval()
