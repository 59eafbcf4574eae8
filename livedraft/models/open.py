"""Open any model: the native decoder where it knows the family, transformers' own model otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from livedraft.device import ExecutionPath
from livedraft.models.config import NATIVE_FAMILIES
from livedraft.models.decoder import DecoderWeights
from livedraft.models.hf_runtime import HFRuntime, load_hf_model, max_positions_of
from livedraft.models.load import LoadedModel, build_weights, load_model, read_config, read_json
from livedraft.models.native import fitted, make_decoder
from livedraft.models.step import ModelStep


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model read and checked, not yet given a cache."""

    fingerprint: str
    path: ExecutionPath
    """The one asked for, as this model can have it."""
    max_positions: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    native: LoadedModel | None = None
    weights: DecoderWeights | None = None
    """Laid out for the execution path; with `native` only."""
    hf_model: Any = None

    @property
    def num_parameters(self) -> int:
        if self.native is not None:
            return sum(tensor.numel() for tensor in self.native.tensors.values())
        return sum(parameter.numel() for parameter in self.hf_model.parameters())

    @property
    def num_weight_bytes(self) -> int:
        """That a pass of a small batch reads: tied embeddings once."""
        if self.native is None or not self.native.blocks:
            return self.num_parameters * (1 if self.path.is_int8 else self.path.dtype.itemsize)
        stored = self.native.blocks
        plain = sum(tensor.numel() for name, tensor in self.native.tensors.items() if name not in stored)
        return self.path.dtype.itemsize * plain + sum(
            blocks.levels_OI.numel() * blocks.num_bits // 8
            + blocks.scales_OB.numel() * (4 if blocks.num_bits == 4 else 2)
            for blocks in stored.values()
        )

    def kv_bytes_per_position(self, num_draft_layers: int) -> int:
        """Keys and values of one token, for the target and a draft of so many of its layers."""
        if self.native is not None:
            config = self.native.config
            num_layers, num_heads, width = config.num_layers, config.num_kv_heads, config.head_width
        else:
            raw = self.hf_model.config
            num_layers, num_draft_layers = int(raw.num_hidden_layers), 0
            num_heads = int(getattr(raw, "num_key_value_heads", None) or raw.num_attention_heads)
            width = int(getattr(raw, "head_dim", None) or raw.hidden_size // raw.num_attention_heads)
        return 2 * (num_layers + num_draft_layers) * num_heads * width * self.path.dtype.itemsize

    def runtime(self, *, num_slots: int, max_length: int) -> ModelStep:
        """The model step with a cache of its own. Raises UserError when the model cannot be rewound."""
        if self.native is None or self.weights is None:
            return HFRuntime(self.hf_model, num_slots=num_slots, max_length=max_length, device=self.path.device)
        return make_decoder(self.native.config, self.weights, self.path, num_slots=num_slots, max_length=max_length)


def is_native(model_path: Path) -> bool:
    """Whether the native decoder reads it; only then can a draft be made of its layers and learn."""
    return not model_path.is_dir() or read_json(model_path / "config.json").get("model_type") in NATIVE_FAMILIES


def vocabulary_size_of(model_path: Path) -> int:
    """Without reading any weights. Raises UserError as `open_model`."""
    if is_native(model_path):
        return read_config(model_path).vocabulary_size
    return int(read_json(model_path / "config.json")["vocab_size"])


def open_model(model_path: Path, path: ExecutionPath) -> OpenModel:
    """Raises UserError when the path is wrong, a file is damaged, or the model is of a kind that cannot be served."""
    if not is_native(model_path):
        path = replace(fitted(path, None), is_graphed=False)
        hf_model, fingerprint = load_hf_model(model_path, path.dtype, path.device)
        eos = getattr(hf_model.config, "eos_token_id", None)
        return OpenModel(
            fingerprint=fingerprint,
            path=path,
            max_positions=max_positions_of(hf_model),
            vocabulary_size=int(hf_model.config.vocab_size),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,)),
            hf_model=hf_model,
        )
    path = fitted(path, read_config(model_path))
    native = load_model(model_path, path.dtype, keep_blocks=path.is_int4)
    return OpenModel(
        fingerprint=native.fingerprint,
        path=path,
        max_positions=native.config.max_positions,
        vocabulary_size=native.config.vocabulary_size,
        eos_token_ids=native.config.eos_token_ids,
        native=native,
        weights=build_weights(native, path),
    )
