"""Draft weights: a few layers, a norm and a head over a trimmed vocabulary. Float32 on disk and in training.

The target's input embedding is frozen and shared, never stored with a draft.

Legend: D width, W draft vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from livedraft.device import ExecutionPath
from livedraft.models.config import ModelConfig, config_from_dict
from livedraft.models.decoder import DecoderWeights, GatedLinear, LayerWeights, Linear, LinearKinds
from livedraft.models.load import EMBEDDING, HEAD, LoadedModel
from livedraft.models.native import linear_kinds
from livedraft.records import UserError


class DamagedDraftError(UserError):
    """The file itself is at fault; any other error may be the machine's or the installation's."""


@dataclass(kw_only=True)
class DraftWeights:
    """Named float32 tensors plus `draft_to_target_W`: the target id of each head row, ascending.

    Three kinds: some layers in the target's own shape, over its embedding (neither config is given); a whole small model of a
    family the native decoder reads, in a shape of its own (`config`, and a tensor `embedding`); a whole model of transformers
    (`hf_config`, tensors under their names there).
    """

    tensors: dict[str, torch.Tensor]
    draft_to_target_W: torch.Tensor
    config: ModelConfig | None = None
    hf_config: dict[str, Any] | None = None

    @property
    def is_whole_model(self) -> bool:
        return self.config is not None or self.hf_config is not None

    @property
    def num_layers(self) -> int:
        if self.hf_config is not None:
            return int(self.hf_config.get("num_hidden_layers") or self.hf_config.get("n_layer") or 0)
        return 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("layers."))

    @property
    def vocabulary_size(self) -> int:
        return self.draft_to_target_W.shape[0]

    @property
    def max_positions(self) -> int | None:
        """The context of a whole model; None for layers of the target."""
        if self.hf_config is not None:
            names = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
            return next((int(self.hf_config[name]) for name in names if self.hf_config.get(name)), None)
        return self.config.max_positions if self.config is not None else None

    @property
    def num_input_tokens(self) -> int | None:
        """Token ids a whole model can read; None for layers of the target, which read all."""
        if self.hf_config is not None:
            return int(self.hf_config["vocab_size"])
        return self.config.vocabulary_size if self.config is not None else None


def draft_from_target(model: LoadedModel, *, num_layers: int, token_ids: list[int]) -> DraftWeights:
    """An untrained draft: the target's first layers, its final norm, and its head's rows for the given tokens.

    Raises ValueError for more layers than the target has or a token it does not know.
    """
    config, source = model.config, model.tensors
    if num_layers > config.num_layers:
        raise ValueError(f"num_draft_layers is {num_layers}, but the target has {config.num_layers} layers.")
    if not token_ids or max(token_ids) >= config.vocabulary_size or min(token_ids) < 0:
        raise ValueError(f"The draft vocabulary must hold token ids within 0..{config.vocabulary_size - 1}.")
    tensors: dict[str, torch.Tensor] = {}
    for index in range(num_layers):
        prefix, attention = f"model.layers.{index}.", f"model.layers.{index}.self_attn."

        def fused(names: list[str], part: str) -> torch.Tensor:
            return torch.cat([source[f"{name}.{part}"] for name in names])

        qkv = [attention + "q_proj", attention + "k_proj", attention + "v_proj"]
        layer = {
            "attention_norm": source[prefix + "input_layernorm.weight"],
            "query_key_value.weight": fused(qkv, "weight"),
            "attention_output.weight": source[attention + "o_proj.weight"],
            "feed_forward_norm": source[prefix + "post_attention_layernorm.weight"],
            "gate_up.weight": fused([prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], "weight"),
            "down.weight": source[prefix + "mlp.down_proj.weight"],
        }
        if config.has_qkv_bias:
            layer["query_key_value.bias"] = fused(qkv, "bias")
        if config.has_qk_norm:
            layer["query_norm"] = source[attention + "q_norm.weight"]
            layer["key_norm"] = source[attention + "k_norm.weight"]
        tensors.update({f"layers.{index}.{name}": tensor.float().clone() for name, tensor in layer.items()})
    ids_W = torch.tensor(sorted(set(token_ids)))
    tensors["final_norm"] = source["model.norm.weight"].float().clone()
    tensors["head"] = source.get(HEAD, source[EMBEDDING])[ids_W].float()
    return DraftWeights(tensors=tensors, draft_to_target_W=ids_W)


def draft_from_model(model: LoadedModel, shared_vocabulary_size: int) -> DraftWeights:
    """A whole small model as a draft that can learn; only tokens that target and draft both have are proposed."""
    tokens = list(range(min(shared_vocabulary_size, model.config.vocabulary_size)))
    draft = draft_from_target(model, num_layers=model.config.num_layers, token_ids=tokens)
    draft.tensors["embedding"] = model.tensors[EMBEDDING].float().clone()
    draft.config = model.config
    return draft


def draft_from_hf(module: Any, shared_vocabulary_size: int) -> DraftWeights:
    """The same for a model of transformers."""
    tensors = {name: parameter.detach().float().clone() for name, parameter in module.named_parameters()}
    num_tokens = min(shared_vocabulary_size, int(module.config.vocab_size))
    return DraftWeights(
        tensors=tensors,
        draft_to_target_W=torch.arange(num_tokens),
        hf_config=json.loads(module.config.to_json_string()),
    )


def lowest_token_ids(vocabulary_size: int, size: int) -> list[int]:
    """The draft vocabulary before any traffic: low ids are the frequent tokens of a BPE vocabulary."""
    return list(range(min(size, vocabulary_size)))


def decoder_weights(
    draft: DraftWeights,
    embedding_VD: torch.Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kinds: LinearKinds = (Linear, GatedLinear),
) -> DecoderWeights:
    """The draft as weights of the shared decoder. With dtype float32 and no packing the tensors are shared, not copied:
    the trainer's parameters pass straight through."""
    make, make_gated = kinds

    def get(name: str) -> torch.Tensor:
        return draft.tensors[name].to(device, dtype)

    def optional(name: str) -> torch.Tensor | None:
        return get(name) if name in draft.tensors else None

    def linear(name: str) -> Linear:
        return make(get(f"{name}.weight"), optional(f"{name}.bias"))

    layers = []
    for index in range(draft.num_layers):
        prefix = f"layers.{index}."
        layers.append(
            LayerWeights(
                attention_norm_D=get(prefix + "attention_norm"),
                query_key_value=linear(prefix + "query_key_value"),
                attention_output=linear(prefix + "attention_output"),
                feed_forward_norm_D=get(prefix + "feed_forward_norm"),
                gate_up=make_gated(get(prefix + "gate_up.weight")),
                down=linear(prefix + "down"),
                query_norm_E=optional(prefix + "query_norm"),
                key_norm_E=optional(prefix + "key_norm"),
            )
        )
    return DecoderWeights(
        embedding_VD=embedding_VD, layers=layers, final_norm_D=get("final_norm"), head=make(get("head"))
    )


def serving_weights(
    draft: DraftWeights, target: DecoderWeights | None, path: ExecutionPath, config: ModelConfig
) -> DecoderWeights:
    """The draft laid out for the execution path, sharing the target's embedding in memory unless it has its own."""
    if "embedding" in draft.tensors:
        embedding_VD = draft.tensors["embedding"].to(path.device, path.dtype)
    else:
        assert target is not None, "a draft of the target's layers needs the target's embedding"
        embedding_VD = target.embedding_VD
    return decoder_weights(draft, embedding_VD, dtype=path.dtype, device=path.device, kinds=linear_kinds(path, config))


def check_against_target(
    draft: DraftWeights, config: ModelConfig | None, origin: str, target_vocabulary_size: int
) -> None:
    """Raises UserError naming the first tensor that does not fit `config`: the target's, or a whole model's own. Kernels trust
    these shapes, so every tensor is looked at."""
    ids_W = draft.draft_to_target_W
    if ids_W.numel() == 0 or int(ids_W.min()) < 0 or int(ids_W.max()) >= target_vocabulary_size:
        raise UserError(f"{origin} does not fit this target: its vocabulary names tokens the target does not have.")
    if draft.hf_config is not None or config is None:
        return  # transformers checks its own shapes
    expected = _expected_shapes(draft, config)
    for name in sorted(expected.keys() | draft.tensors.keys()):
        found = draft.tensors.get(name)
        if found is None or name not in expected or tuple(found.shape) != expected[name]:
            shape = f"should have shape {expected[name]}" if name in expected else "is not known"
            raise UserError(f"{origin} does not fit this target: {name} {shape}.")


def _expected_shapes(draft: DraftWeights, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F, E = config.width, config.feed_forward_width, config.head_width
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * E
    shapes: dict[str, tuple[int, ...]] = {"final_norm": (D,), "head": (draft.vocabulary_size, D)}
    if draft.config is not None:
        shapes["embedding"] = (config.vocabulary_size, D)
    for index in range(draft.num_layers):
        layer = {
            "attention_norm": (D,),
            "query_key_value.weight": (qkv_rows, D),
            "attention_output.weight": (D, config.num_heads * E),
            "feed_forward_norm": (D,),
            "gate_up.weight": (2 * F, D),
            "down.weight": (D, F),
        }
        if config.has_qkv_bias:
            layer["query_key_value.bias"] = (qkv_rows,)
        if config.has_qk_norm:
            layer |= {"query_norm": (E,), "key_norm": (E,)}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def save_draft(draft: DraftWeights, path: Path) -> str:
    """Write one safetensors file and return its sha256. The caller renames it into place."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in draft.tensors.items()}
    kinds = {"config": draft.config and asdict(draft.config), "hf_config": draft.hf_config}
    metadata = {name: json.dumps(kind) for name, kind in kinds.items() if kind is not None}
    save_file({**tensors, "draft_to_target": draft.draft_to_target_W}, path, metadata=metadata or None)
    return file_sha256(path)


def load_draft(path: Path) -> DraftWeights:
    """Raises UserError when the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return DraftWeights(
            draft_to_target_W=tensors.pop("draft_to_target"),
            tensors=tensors,
            config=config_from_dict(json.loads(metadata["config"])) if "config" in metadata else None,
            hf_config=json.loads(metadata["hf_config"]) if "hf_config" in metadata else None,
        )
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamagedDraftError(f"{path} is damaged or no draft ({error}).") from error


def file_sha256(path: Path) -> str:
    """Raises OSError when the file cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
