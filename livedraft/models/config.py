"""The few numbers that tell one Llama-like decoder from another, from a `config.json` or from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from livedraft.records import UserError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling; `factor` alone is linear position scaling."""

    kind: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: str  # llama, qwen2 or qwen3
    vocabulary_size: int
    width: int
    feed_forward_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    has_tied_embeddings: bool
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_query_heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"The model says {self.num_heads} heads and {self.num_kv_heads} key-value heads, which do not divide; "
                "the file is damaged or of an unknown kind."
            )


def config_from_dict(fields: dict[str, Any]) -> ModelConfig:
    """What dataclasses.asdict made, through JSON. Raises TypeError for anything else."""
    scaling = fields.get("rope_scaling")
    return ModelConfig(
        **{
            **fields,
            "rope_scaling": RopeScaling(**scaling) if scaling else None,
            "eos_token_ids": tuple(fields.get("eos_token_ids", ())),
        }
    )


NATIVE_FAMILIES = ("llama", "qwen2", "qwen3")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back, and that transformers knows."""
    raw: dict[str, Any] = {
        "architectures": [f"{config.family.capitalize()}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.has_tied_embeddings,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "hidden_act": "silu",
    }
    scaling = config.rope_scaling
    if scaling is not None:
        raw["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            raw["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
    return raw


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face `config.json`. Raises UserError for a feature the native decoder would get wrong."""
    family = raw.get("model_type", "")
    if family not in NATIVE_FAMILIES:
        raise UserError(f"model_type {family!r} is not one of the native families {', '.join(NATIVE_FAMILIES)}.")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {raw['hidden_act']!r} is not supported by the native decoder; only silu is.")
    if raw.get("mlp_bias") or (family == "qwen3" and raw.get("attention_bias")):
        raise UserError("This model has biases the native decoder does not read (mlp_bias or attention_bias).")
    if family == "llama" and raw.get("attention_bias"):
        raise UserError("This Llama variant has attention_bias, which the native decoder does not read.")
    if raw.get("use_sliding_window"):
        raise UserError(
            "use_sliding_window is not supported by the native decoder; set it to false or use another model."
        )
    num_heads = raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    # transformers 5 writes rope_theta and the scaling into one `rope_parameters` table.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    return ModelConfig(
        family=family,
        vocabulary_size=raw["vocab_size"],
        width=raw["hidden_size"],
        feed_forward_width=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_width=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        max_positions=raw["max_position_embeddings"],
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        rope_scaling=_rope_scaling_from_hf(rope),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
    )


def _rope_scaling_from_hf(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    raise UserError(f"Rope scaling {kind!r} is not supported by the native decoder (default, linear and llama3 are).")


def config_from_gguf(metadata: dict[str, Any], tensor_names: set[str]) -> ModelConfig:
    """Read GGUF metadata. Raises UserError for an architecture or a rope the native decoder would get wrong."""
    family = metadata.get("general.architecture", "")
    if family not in NATIVE_FAMILIES:
        raise UserError(
            f"The GGUF file's architecture is {family!r}; the native decoder reads {', '.join(NATIVE_FAMILIES)}."
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{family}.{key}", default)
        if found is None:
            raise UserError(f"The GGUF file has no {family}.{key}; it is damaged or of an unknown kind.")
        return found

    scaling_kind = metadata.get(f"{family}.rope.scaling.type", "none")
    scaling = None
    if scaling_kind == "linear":
        scaling = RopeScaling(kind="linear", factor=float(value("rope.scaling.factor")))
    elif scaling_kind != "none" or "rope_freqs.weight" in tensor_names:
        raise UserError(
            f"The GGUF file scales its rope in a way the native decoder does not read ({scaling_kind!r}); "
            "use the model's Hugging Face folder instead."
        )
    num_heads = int(value("attention.head_count"))
    width = int(value("embedding_length"))
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        family=family,
        vocabulary_size=len(metadata.get("tokenizer.ggml.tokens") or ()) or int(value("vocab_size")),
        width=width,
        feed_forward_width=int(value("feed_forward_length")),
        num_layers=int(value("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(value("attention.head_count_kv", num_heads)),
        head_width=int(value("attention.key_length", width // num_heads)),
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        max_positions=int(value("context_length")),
        has_tied_embeddings="output.weight" not in tensor_names,
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        rope_scaling=scaling,
        eos_token_ids=() if eos is None else (int(eos),),
    )
