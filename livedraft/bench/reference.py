"""transformers as the independent reference, for logits (tests) and speed (bench)."""

from __future__ import annotations

from typing import Any

import torch

from livedraft.models.config import ModelConfig


def transformers_model(tensors: dict[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype) -> Any:
    """transformers' model class with our tensors: the independent reference for logits and speed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
    hf_config = AutoConfig.for_model(
        config.family,
        vocab_size=config.vocabulary_size,
        hidden_size=config.width,
        intermediate_size=config.feed_forward_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_width,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.has_tied_embeddings,
        dtype=dtype,
    )
    with torch.device("meta"):  # no random initialisation of weights that are replaced at once
        hf_model = AutoModelForCausalLM.from_config(hf_config)
    hf_model.to_empty(device="cpu")
    missing, unexpected = hf_model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    hf_model.tie_weights()
    fresh = type(hf_model.model.rotary_emb)(hf_config)  # its buffers are computed, not loaded
    hf_model.model.rotary_emb = fresh
    return hf_model.to(dtype).eval()
