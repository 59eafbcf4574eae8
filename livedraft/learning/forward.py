"""A draft run over whole texts, teacher-forced, with autograd: what training and scoring ask of its weights.

Two kinds: layers of the native decoder (the serving code, over the target's frozen embedding or, for a whole small model,
over its own), and any causal language model of transformers.

Legend: B sequences, T tokens, N rows, H heads, G key-value heads, E head width, D width, V vocabulary.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from livedraft.drafts.weights import DraftWeights, decoder_weights
from livedraft.models.config import ModelConfig
from livedraft.models.decoder import RotaryTable, run_layers
from livedraft.models.load import load_embedding_and_head
from livedraft.models.open import vocabulary_size_of
from livedraft.records import UserError


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """What training needs of the target. A draft of the target's own layers shares its config and embedding (float32,
    frozen), and new rows of its vocabulary start from the target's head; a whole model needs the vocabulary's size alone."""

    vocabulary_size: int
    config: ModelConfig | None = None
    embedding_VD: torch.Tensor | None = None
    head_VD: torch.Tensor | None = None

    @classmethod
    def load(cls, path: Path, draft: DraftWeights) -> TargetParts:
        """Raises UserError when the target cannot be read."""
        if draft.is_whole_model:
            return cls(vocabulary_size=vocabulary_size_of(path))
        config, embedding_VD, head_VD = load_embedding_and_head(path)
        return cls(vocabulary_size=config.vocabulary_size, config=config, embedding_VD=embedding_VD, head_VD=head_VD)


class Forward(Protocol):
    head: Callable[[torch.Tensor], torch.Tensor]
    """Hidden states [N, D] to logits over the draft's vocabulary."""
    num_weights: int
    """That take part in products."""
    num_head_weights: int
    """Of them, those of the head."""

    def hidden(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        """Final normed hidden states [B * T, D]. Padding is on the right, so causal attention never sees it."""


def forward_of(draft: DraftWeights, target: TargetParts, max_positions: int) -> Forward:
    """The draft's tensors may be parameters: they are used as they are, not copied."""
    if draft.hf_config is not None:
        return TransformersForward(draft)
    return DecoderForward(draft, target, max_positions)


class DecoderForward:
    def __init__(self, draft: DraftWeights, target: TargetParts, max_positions: int) -> None:
        config = draft.config or target.config
        assert config is not None
        embedding_VD = draft.tensors.get("embedding", target.embedding_VD)
        assert embedding_VD is not None
        self._config = config
        self._rotary = _rotary_table(config, max_positions)
        self._weights = decoder_weights(draft, embedding_VD, dtype=torch.float32, device=torch.device("cpu"))
        self.head = self._weights.head
        layers = sum(
            linear.weight.numel()
            for layer in self._weights.layers
            for linear in (layer.query_key_value, layer.attention_output, layer.gate_up, layer.down)
        )
        self.num_head_weights = self._weights.head.weight.numel()
        self.num_weights = layers + self.num_head_weights

    def hidden(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        B, T = token_ids_BT.shape
        config = self._config
        repeats = config.num_query_heads_per_kv

        def attend(
            _layer: int, queries_NHE: torch.Tensor, keys_NGE: torch.Tensor, values_NGE: torch.Tensor
        ) -> torch.Tensor:
            queries, keys, values = (
                x.reshape(B, T, -1, config.head_width).transpose(1, 2) for x in (queries_NHE, keys_NGE, values_NGE)
            )
            # Written out: on CPUs the fused kernel's backward pass is several times slower than these products.
            keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
            scores_BHTT = queries @ keys.transpose(-1, -2) * config.head_width**-0.5
            attended = (scores_BHTT + mask_TT).softmax(-1).to(values.dtype) @ values
            return attended.transpose(1, 2).reshape(B * T, -1)

        mask_TT = torch.full((T, T), -torch.inf).triu(1)
        hidden_ND = F.embedding(token_ids_BT.view(-1), self._weights.embedding_VD)
        positions_N = torch.arange(T).repeat(B)
        hidden_ND = run_layers(hidden_ND, positions_N, self._weights.layers, config, self._rotary, attend)
        return F.rms_norm(hidden_ND, (config.width,), self._weights.final_norm_D, config.norm_eps)


@functools.lru_cache(maxsize=4)
def _rotary_table(config: ModelConfig, max_positions: int) -> RotaryTable:
    return RotaryTable(config, max_positions, torch.float32, torch.device("cpu"))


class TransformersForward:
    """The module is only the recipe; the numbers are the draft's tensors."""

    def __init__(self, draft: DraftWeights) -> None:
        assert draft.hf_config is not None
        self._module, self._head_names = _recipe(json.dumps(draft.hf_config, sort_keys=True))
        prefix = f"{self._module.base_model_prefix}."
        self._body = {
            name.removeprefix(prefix): tensor for name, tensor in draft.tensors.items() if name.startswith(prefix)
        }
        self._head = [draft.tensors[name] if name else None for name in self._head_names]
        self._num_tokens = draft.vocabulary_size
        embedding = self._module.get_input_embeddings().weight.numel()
        is_tied = self._head_names[0].startswith(prefix)
        self.num_head_weights = draft.tensors[self._head_names[0]].numel()
        self.num_weights = sum(t.numel() for t in draft.tensors.values()) - (0 if is_tied else embedding)

    def hidden(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(self._module.base_model, self._body, (token_ids_BT,), {"use_cache": False})
        hidden_BTD: torch.Tensor = output.last_hidden_state
        return hidden_BTD.reshape(-1, hidden_BTD.shape[-1])

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        weight_VD, bias_V = self._head
        assert weight_VD is not None
        V = self._num_tokens  # a padded head has rows that are no tokens
        return F.linear(hidden_ND, weight_VD[:V], None if bias_V is None else bias_V[:V])


@functools.lru_cache(maxsize=2)
def _recipe(hf_config: str) -> tuple[Any, tuple[str, str]]:
    """(module, names of the head's weight and bias among its parameters; "" for no bias)."""
    from livedraft.models.hf_runtime import module_of_config

    module = module_of_config(json.loads(hf_config))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    head = module.get_output_embeddings()
    tokens_BT = torch.arange(4)[None]
    with torch.no_grad():
        hidden_BTD = module.base_model(tokens_BT, use_cache=False).last_hidden_state
        if not torch.allclose(head(hidden_BTD), module(tokens_BT, use_cache=False).logits, atol=1e-3, rtol=1e-3):
            raise UserError(
                f"{type(module).__name__} scales or caps its logits after the head; such a draft can serve but not learn."
            )
    bias = getattr(head, "bias", None)
    return module, (names[id(head.weight)], "" if bias is None else names[id(bias)])
