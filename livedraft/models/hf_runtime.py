"""Other transformers causal language models (GPT-NeoX/Pythia, CodeGen, Phi, OPT ...) behind the same model step.

One croppable cache a slot, a batch as a plain loop: correct and slow. A model is admitted by a self-test at load; one whose
cache cannot be cropped, or that keeps recurrent state, is refused with the reason.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch

from livedraft.models.kv_cache import split_into_segments
from livedraft.models.step import StepOutput
from livedraft.records import UserError

_SELF_TEST_LENGTH, _SELF_TEST_CUT = 24, 14
_SELF_TEST_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest difference of logits, relative to the largest logit."""


class HFRuntime:
    def __init__(self, model: Any, *, num_slots: int, max_length: int, device: torch.device) -> None:
        """Raises UserError when the model cannot be rewound."""
        self.model = model
        self.num_slots = num_slots
        self.max_length = max_length
        self.vocabulary_size = int(model.config.vocab_size)
        self.device = device
        self._caches: list[Any] = [None] * num_slots
        # transformers renames the argument family by family, with a warning at each call in between.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        _refuse_recurrent(model)
        self._self_test()

    @torch.inference_mode()
    def forward(
        self, token_ids_N: list[int], positions_N: list[int], slots_N: list[int], logit_rows_R: list[int]
    ) -> StepOutput:
        assert len(token_ids_N) == len(positions_N) == len(slots_N) > 0
        wanted = set(logit_rows_R)
        rows: dict[int, torch.Tensor] = {}
        for segment in split_into_segments(positions_N, slots_N):
            assert segment.length <= self.max_length, "position past the cache"
            first, last = segment.first_row, segment.first_row + segment.num_rows
            logits_NV = self._run(segment.slot, segment.first_position, token_ids_N[first:last])
            rows |= {row: logits_NV[row - first] for row in range(first, last) if row in wanted}
        if not rows:
            return StepOutput(logits_RV=torch.empty(0, self.vocabulary_size, device=self.device))
        return StepOutput(logits_RV=torch.stack([rows[row] for row in logit_rows_R]))

    def clear_slot(self, slot: int) -> None:
        self._caches[slot] = None

    def copy_slot(self, source: int, destination: int, num_positions: int) -> None:
        cache = copy.deepcopy(self._caches[source])
        surplus = cache.get_seq_length() - num_positions
        assert surplus >= 0, "a slot holds fewer positions than are copied from it"
        if surplus > 0:
            cache.crop(-surplus)
        self._caches[destination] = cache

    def _run(self, slot: int, first_position: int, token_ids: list[int]) -> torch.Tensor:
        """Crop the slot's cache to `first_position`, then one forward pass; float32 logits of all its rows."""
        from transformers import DynamicCache

        if first_position == 0 or self._caches[slot] is None:
            assert first_position == 0, "a slot is written from its beginning"
            self._caches[slot] = DynamicCache()
        cache = self._caches[slot]
        length = cache.get_seq_length()
        assert first_position <= length, "positions of a slot must be consecutive"
        if first_position < length:
            cache.crop(first_position - length)  # negative: how many to drop; newer transformers refuse the other form
        input_ids = torch.tensor([token_ids], device=self.device)
        output = self.model(input_ids=input_ids, use_cache=True, **{self._cache_argument: cache})
        # The head may be padded past the vocabulary; those rows are never tokens.
        return output.logits[0, :, : self.vocabulary_size].float()

    def _self_test(self) -> None:
        """Crop and replay must give the logits of a fresh pass; otherwise speculation would change the output."""
        name = type(self.model).__name__
        window = getattr(self.model.config, "sliding_window", None) or 0
        length = min(self.max_length, max(_SELF_TEST_LENGTH, window + _SELF_TEST_LENGTH))
        cut = length - (_SELF_TEST_LENGTH - _SELF_TEST_CUT)
        token_ids = [(7 * index + 3) % self.vocabulary_size for index in range(length)]
        wrong = [(token + 1) % self.vocabulary_size for token in token_ids[cut:]]
        try:
            fresh_NV = self._run(0, 0, token_ids)[cut:]
            self._caches[0] = None
            self._run(0, 0, token_ids[:cut])
            self._run(0, cut, wrong)
            replayed_NV = self._run(0, cut, token_ids[cut:])
        except Exception as error:  # whatever a cache of an unknown kind raises means it cannot be rewound
            raise UserError(
                f"{name} cannot be served: its cache cannot be cropped and replayed ({type(error).__name__}: {error})."
            ) from error
        finally:
            self._caches[0] = None
        difference = ((fresh_NV - replayed_NV).abs().max() / fresh_NV.abs().max()).item()
        if not difference <= _SELF_TEST_TOLERANCE[self.model.dtype]:
            raise UserError(
                f"{name} cannot be served: after cropping its cache and replaying, logits differ by {difference:.3g} of "
                "the largest, so rejected tokens would leave traces."
            )


def _refuse_recurrent(model: Any) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model; livedraft serves decoder-only models.")
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in layer_types if "attention" not in kind or "linear" in kind)
    if getattr(model, "_is_stateful", False) or recurrent:
        reason = f" ({', '.join(recurrent)})" if recurrent else ""
        raise UserError(f"{name} keeps recurrent state{reason}, which cannot be rewound after a rejected token.")


def load_hf_model(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, str]:
    """(transformers model, fingerprint). Raises UserError naming what is missing, unknown or damaged."""
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True, use_safetensors=True
        )
    except Exception as error:  # transformers raises many kinds; the first line says what it is
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"transformers cannot load {path}: {first_line}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(kind) or ())
        if names:
            raise UserError(f"{path} has {len(names)} {kind.replace('_', ' ')}, the first is {names[0]}.")
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.reshape(-1)[:: max(1, tensor.numel() // 256)].float().contiguous().numpy().tobytes())
    return model.to(device).eval(), digest.hexdigest()[:16]


def module_of_config(raw: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """A transformers model of this config in float32, with the given parameters or with numbers still to be given.

    Raises UserError for an unknown kind or parameters that are not this model's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(raw)
    try:
        config = AutoConfig.for_model(fields.pop("model_type", ""), **fields)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if tensors is not None:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(tensors[name])
        return module
    except Exception as error:  # transformers raises many kinds; the first line says what it is
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"transformers cannot build this draft: {first_line}") from error


def max_positions_of(model: Any) -> int:
    """The model's context length, whatever its family calls it."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        value = getattr(model.config, name, None)
        if value:
            return int(value)
    raise UserError(f"{type(model).__name__} does not say how long its context is; livedraft cannot bound its cache.")
