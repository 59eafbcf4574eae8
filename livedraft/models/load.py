"""Read a model: a Hugging Face folder (safetensors, sharded too) or a GGUF file, into one canonical set of tensors.

Every tensor is checked: an unknown, missing or misshapen one is an error that names it.

Legend: D width, H query heads, G key-value heads, E head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from livedraft.device import ExecutionPath
from livedraft.gguf_file import read_gguf
from livedraft.models.blocks import Blocks, blocks_of
from livedraft.models.blocks import joined as joined_blocks
from livedraft.models.config import ModelConfig, config_from_gguf, config_from_hf
from livedraft.models.decoder import DecoderWeights, LayerWeights, Linear
from livedraft.models.native import linear_kinds
from livedraft.records import UserError

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    """Hugging Face names, in the run's dtype; no head where it is tied to the embedding."""
    fingerprint: str
    blocks: dict[str, Blocks] = field(default_factory=dict)
    """Of the same names, what a GGUF file stores in blocks; where they were asked for."""


def load_model(
    path: Path,
    dtype: torch.dtype,
    *,
    keep_blocks: bool = False,
    keep: Callable[[str], bool] = lambda name: True,
) -> LoadedModel:
    """Read, check and convert all tensors, of which those named by `keep` stay in memory. Raises UserError when the path is
    wrong, the file is damaged or unknown, or the blocks to keep are not there."""
    config, stored_tensors = _open(path)
    expected = expected_shapes(config)
    digest = hashlib.sha256(repr(config).encode())
    tensors: dict[str, torch.Tensor] = {}
    found: set[str] = set()
    for name, read in sorted(stored_tensors):
        if name == HEAD and config.has_tied_embeddings:
            continue  # some exporters store the tied copy too
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a buffer old exporters wrote; it follows from the config
        if name not in expected:
            raise UserError(f"{path} holds a tensor livedraft does not know: {name}; the model is of another kind.")
        tensor = read()
        if tuple(tensor.shape) != expected[name]:
            raise UserError(
                f"Tensor {name} in {path} has shape {tuple(tensor.shape)}, but the config asks for {expected[name]}; "
                "the file is damaged or belongs to another config."
            )
        sample = tensor.reshape(-1)[:: max(1, tensor.numel() // 256)].float()
        if not bool(torch.isfinite(sample).all()):
            raise UserError(f"Tensor {name} in {path} holds values that are not numbers; the file is damaged.")
        digest.update(name.encode())
        digest.update(sample.contiguous().numpy().tobytes())
        found.add(name)
        if keep(name):
            tensors[name] = tensor.to(dtype).contiguous()
    missing = sorted(expected.keys() - found)
    if missing:
        raise UserError(
            f"{path} lacks {len(missing)} tensor(s), the first is {missing[0]}; the download is incomplete."
        )
    return LoadedModel(
        config=config,
        tensors=tensors,
        fingerprint=digest.hexdigest()[:16],
        blocks=_stored_blocks(path, config) if keep_blocks else {},
    )


def load_embedding_and_head(path: Path) -> tuple[ModelConfig, torch.Tensor, torch.Tensor]:
    """Config, input embedding [V, D] and head [V, D] in float32: all a trainer needs of the target beside the draft.
    Tied weights come back as one tensor."""
    config, stored_tensors = _open(path)
    readers = dict(stored_tensors)
    if EMBEDDING not in readers or (HEAD not in readers and not config.has_tied_embeddings):
        raise UserError(f"{path} lacks its embedding or its head; the file is damaged.")
    embedding_VD = readers[EMBEDDING]().float().contiguous()
    head_VD = embedding_VD if config.has_tied_embeddings else readers[HEAD]().float().contiguous()
    return config, embedding_VD, head_VD


def read_config(path: Path) -> ModelConfig:
    """Raises UserError when the path is wrong or the file is damaged or unknown."""
    return _open(path)[0]


StoredTensor = tuple[str, Callable[[], torch.Tensor]]


def _open(path: Path) -> tuple[ModelConfig, list[StoredTensor]]:
    if not path.exists():
        raise UserError(f"No model at {path}; give a Hugging Face folder or a GGUF file, or run `livedraft pull`.")
    if path.is_dir():
        return _open_hf_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise UserError(f"{path} is neither a folder with config.json nor a .gguf file.")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor this config must have."""
    D, F, E, V = config.width, config.feed_forward_width, config.head_width, config.vocabulary_size
    H, G = config.num_heads, config.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (V, D), FINAL_NORM: (D,)}
    if not config.has_tied_embeddings:
        shapes[HEAD] = (V, D)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (D,)
        shapes[layer + "post_attention_layernorm.weight"] = (D,)
        for name, rows in (("q", H * E), ("k", G * E), ("v", G * E)):
            shapes[layer + f"self_attn.{name}_proj.weight"] = (rows, D)
            if config.has_qkv_bias:
                shapes[layer + f"self_attn.{name}_proj.bias"] = (rows,)
        if config.has_qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (E,)
            shapes[layer + "self_attn.k_norm.weight"] = (E,)
        shapes[layer + "self_attn.o_proj.weight"] = (D, H * E)
        shapes[layer + "mlp.gate_proj.weight"] = (F, D)
        shapes[layer + "mlp.up_proj.weight"] = (F, D)
        shapes[layer + "mlp.down_proj.weight"] = (D, F)
    return shapes


# --- Hugging Face folders -------------------------------------------------------------------------------------------


def _open_hf_folder(path: Path) -> tuple[ModelConfig, list[StoredTensor]]:
    from safetensors import SafetensorError, safe_open

    config = config_from_hf(read_json(path / "config.json"))
    index_path = path / "model.safetensors.index.json"
    if index_path.exists():
        weight_map: dict[str, str] = read_json(index_path).get("weight_map", {})
        file_names = sorted(set(weight_map.values()))
    else:
        file_names = ["model.safetensors"]
    stored: list[StoredTensor] = []
    for file_name in file_names:
        file_path = path / file_name
        if not file_path.exists():
            raise UserError(f"{path} has no {file_name}; livedraft reads safetensors weights only.")
        try:
            handle = safe_open(file_path, framework="pt")  # memory-mapped; tensors are read one at a time
            stored += [(name, lambda h=handle, n=name: h.get_tensor(n)) for name in handle.keys()]  # noqa: SIM118 (no iterator)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file_path} is damaged or no safetensors file ({error}); fetch it again.") from error
    return config, stored


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a UserError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}; it is not a Hugging Face model folder.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return value


# --- GGUF -----------------------------------------------------------------------------------------------------------

_GGUF_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    **{f"attn_{x}.{part}": f"self_attn.{x}_proj.{part}" for x in "qkv" for part in ("weight", "bias")},
}
_GGUF_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}


def _open_gguf(path: Path) -> tuple[ModelConfig, list[StoredTensor]]:
    metadata, entries = read_gguf(path)
    config = config_from_gguf(metadata, {entry.name for entry in entries})
    return config, list(_gguf_tensors(config, entries))


def _gguf_tensors(config: ModelConfig, entries: list[Any]) -> Iterator[StoredTensor]:
    for entry in entries:
        name, num_heads = _gguf_name(config, entry.name)
        yield name, lambda e=entry, heads=num_heads: _dequantised(e, heads)


def _gguf_name(config: ModelConfig, stored: str) -> tuple[str, int]:
    """(our name, heads whose rotary halves are interleaved there): llama.cpp does so to the Llama family's queries and keys;
    ours (and transformers') keeps them apart."""
    name = _GGUF_NAMES.get(stored, stored)
    if stored.startswith("blk."):
        _, index, rest = stored.split(".", 2)
        name = f"model.layers.{index}.{_GGUF_LAYER_NAMES.get(rest, rest)}"
    num_heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split("self_attn.")[-1][0], 0)
    is_interleaved = config.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
    return name, num_heads if is_interleaved else 0


def _rows_apart(num_rows: int, num_heads: int) -> torch.Tensor:
    return torch.arange(num_rows).view(num_heads, num_rows // num_heads // 2, 2).transpose(1, 2).flatten()


def _stored_blocks(path: Path, config: ModelConfig) -> dict[str, Blocks]:
    found = {}
    for entry in read_gguf(path)[1] if path.suffix == ".gguf" else []:
        name, num_heads = _gguf_name(config, entry.name)
        blocks = blocks_of(entry)
        if blocks is not None:
            found[name] = blocks.of_rows(_rows_apart(blocks.shape[0], num_heads)) if num_heads else blocks
    if not any(blocks.num_bits == 4 for blocks in found.values()):
        raise UserError(f"{path} holds no weights of the kinds Q4_0 or Q4_1, which quantization int4 keeps; use int8.")
    return found


def _dequantised(entry: Any, num_interleaved_heads: int) -> torch.Tensor:
    from gguf import dequantize

    blocks = blocks_of(entry)  # the same numbers as the library's, which takes seconds for them
    try:
        tensor = blocks.values() if blocks else torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
    except NotImplementedError as error:
        raise UserError(
            f"Tensor {entry.name} is stored as {entry.tensor_type.name}, which cannot be read here."
        ) from error
    return tensor[_rows_apart(tensor.shape[0], num_interleaved_heads)] if num_interleaved_heads else tensor


# --- From tensors to weights ----------------------------------------------------------------------------------------


def build_weights(model: LoadedModel, path: ExecutionPath) -> DecoderWeights:
    """All layers and the head, on the execution path's device and in its layout."""
    config, tensors = model.config, model.tensors
    make, make_gated = linear_kinds(path, config)

    def joined(*names: str) -> Any:
        """One matrix of several; the file's own blocks where the path keeps them and all have them alike."""
        blocks = [model.blocks[f"{name}.weight"] for name in names if path.is_int4 and f"{name}.weight" in model.blocks]
        if len(blocks) == len(names) and len({one.num_bits for one in blocks}) == 1:
            return joined_blocks(blocks)
        return torch.cat([tensors[f"{name}.weight"] for name in names]).to(path.device)

    def linear(*names: str) -> Linear:
        weight = joined(*names)
        has_bias = f"{names[0]}.bias" in tensors
        return make(
            weight, torch.cat([tensors[f"{name}.bias"] for name in names]).to(path.device) if has_bias else None
        )

    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."

        def vector(name: str, base: str = prefix) -> torch.Tensor:
            return tensors[base + name].to(path.device)

        layers.append(
            LayerWeights(
                attention_norm_D=vector("input_layernorm.weight"),
                query_key_value=linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                attention_output=linear(attention + "o_proj"),
                feed_forward_norm_D=vector("post_attention_layernorm.weight"),
                gate_up=make_gated(joined(prefix + "mlp.gate_proj", prefix + "mlp.up_proj")),
                down=linear(prefix + "mlp.down_proj"),
                query_norm_E=vector("self_attn.q_norm.weight") if config.has_qk_norm else None,
                key_norm_E=vector("self_attn.k_norm.weight") if config.has_qk_norm else None,
            )
        )
    head = HEAD if HEAD in tensors else EMBEDDING
    return DecoderWeights(
        embedding_VD=tensors[EMBEDDING].to(path.device),
        layers=layers,
        final_norm_D=tensors[FINAL_NORM].to(path.device),
        head=make(joined(head.removesuffix(".weight"))),
    )
