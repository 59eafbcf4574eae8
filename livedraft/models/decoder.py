"""The native decoder: Llama, Qwen2 and Qwen3 families, top to bottom, for the target, the draft and the trainer.

The layers are written once, in `run_layers`. What differs between serving and training is passed in: how to attend
(over a KV cache, or over a padded batch with autograd) and what a linear layer is (prepacked, or a plain tensor).

Legend: N rows (tokens of this pass, ragged over requests), D width, H query heads, G key-value heads, E head width,
F feed-forward width, V vocabulary, R rows whose logits are asked for, B segments attended together, T cache positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from livedraft.device import on_device
from livedraft.models.config import ModelConfig
from livedraft.models.kv_cache import MAX_ROWS_ATTENDED_TOGETHER, KVCache, Segment, split_into_segments
from livedraft.models.step import StepOutput

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer index, queries_NHE, keys_NGE, values_NGE) -> attended_NX with X = H * E."""


class Linear:
    """y = x W^T (+ bias) (+ residual)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y


class PackedLinear(Linear):
    """The same in bf16 on a CPU with oneDNN's blocked weight layout, made once; the residual is added in the kernel.

    torch's plain bf16 linear is weak at one row. `Linear` is the slow twin; a test holds the two equal.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(_pack(weight), bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class GatedLinear:
    """The feed-forward's entry: silu(x gate^T) * (x up^T), from one weight [2F, D] that holds gate and up."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_NF, up_NF = F.linear(x, self.weight).chunk(2, dim=-1)
        return F.silu(gate_NF) * up_NF


class PackedGatedLinear(GatedLinear):
    """The same with silu and the product inside oneDNN's kernels; `GatedLinear` is the slow twin."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.gate, self.up = (_pack(half) for half in weight.chunk(2))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_NF = torch.ops.mkldnn._linear_pointwise(x, self.gate, None, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, gate_NF, self.up, None, "mul")


LinearKinds = tuple[type[Linear], type[GatedLinear]]
"""How the weights of a model are laid out and run."""
_PACKED_FOR_ROWS = 4
"""oneDNN picks the blocking for this many rows: a tenth faster at 1 to 6 rows than when it is not told."""


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)


@dataclass(kw_only=True)
class LayerWeights:
    attention_norm_D: torch.Tensor
    query_key_value: Linear  # [(H + 2G) * E, D]
    attention_output: Linear  # [D, H * E]
    feed_forward_norm_D: torch.Tensor
    gate_up: GatedLinear  # [2F, D]
    down: Linear  # [D, F]
    query_norm_E: torch.Tensor | None = None
    key_norm_E: torch.Tensor | None = None


@dataclass(kw_only=True)
class DecoderWeights:
    embedding_VD: torch.Tensor
    layers: list[LayerWeights]
    final_norm_D: torch.Tensor
    head: Linear  # [V, D]; a draft's head may be trimmed to fewer rows


class RotaryTable:
    """cos and signed sin by position, with Llama 3's or linear frequency scaling."""

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles_TE = torch.outer(torch.arange(num_positions, dtype=torch.float64), rotary_frequencies(config)).repeat(
            1, 2
        )
        sin_TE = angles_TE.sin()
        # rotate_half(x) = roll(x, E/2) with the first half negated; the sign is folded into sin.
        sin_TE[:, : config.head_width // 2].neg_()
        self.cos_T1E = angles_TE.cos().to(device, dtype).unsqueeze(1)
        self.signed_sin_T1E = sin_TE.to(device, dtype).unsqueeze(1)
        self.half = config.head_width // 2

    def rotate(self, x_NHE: torch.Tensor, cos_N1E: torch.Tensor, signed_sin_N1E: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x_NHE * cos_N1E, x_NHE.roll(self.half, -1), signed_sin_N1E)


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """[E / 2] float64 angular frequencies. Llama 3 scaling: long wavelengths are divided, short kept, a ramp between."""
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.float64) / config.head_width
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    torch's CPU kernel is a chain of nine small operations. Serving runs 61 of them a pass, so there it is five; training
    keeps `F.rms_norm`, the slow twin, which knows its gradient; on CUDA it is one kernel.
    """
    if x.is_cuda or not torch.is_inference_mode_enabled():
        return F.rms_norm(x, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.mul_(norm).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * weight).mul_(scale)  # in place: the float32 scale does not widen a bf16 result


def run_layers(
    hidden_ND: torch.Tensor,
    positions_N: torch.Tensor,
    layers: Sequence[LayerWeights],
    config: ModelConfig,
    rotary: RotaryTable,
    attend: Attend,
) -> torch.Tensor:
    """Hidden states after the given layers, before the final norm."""
    H, G, E, eps = config.num_heads, config.num_kv_heads, config.head_width, config.norm_eps
    cos_N1E, signed_sin_N1E = rotary.cos_T1E[positions_N], rotary.signed_sin_T1E[positions_N]
    for index, layer in enumerate(layers):
        normed_ND = rms_norm(hidden_ND, layer.attention_norm_D, eps)
        qkv_NXE = layer.query_key_value(normed_ND).view(-1, H + 2 * G, E)
        values_NGE = qkv_NXE[:, H + G :]
        if layer.query_norm_E is None:
            rotated_NXE = rotary.rotate(qkv_NXE[:, : H + G], cos_N1E, signed_sin_N1E)
            queries_NHE, keys_NGE = rotated_NXE[:, :H], rotated_NXE[:, H:]
        else:
            queries_NHE = rms_norm(qkv_NXE[:, :H], layer.query_norm_E, eps)
            keys_NGE = rms_norm(qkv_NXE[:, H : H + G], layer.key_norm_E, eps)
            queries_NHE = rotary.rotate(queries_NHE, cos_N1E, signed_sin_N1E)
            keys_NGE = rotary.rotate(keys_NGE, cos_N1E, signed_sin_N1E)
        attended_NX = attend(index, queries_NHE, keys_NGE, values_NGE)
        hidden_ND = layer.attention_output(attended_NX, residual=hidden_ND)
        normed_ND = rms_norm(hidden_ND, layer.feed_forward_norm_D, eps)
        hidden_ND = layer.down(layer.gate_up(normed_ND), residual=hidden_ND)
    return hidden_ND


AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(queries_BGXE, keys_BGTE, values_BGTE, mask_B1XT) -> attended_BGXE with X the query heads of a key-value head, by row."""


def attend_by_sdpa(
    queries_BGXE: torch.Tensor, keys_BGTE: torch.Tensor, values_BGTE: torch.Tensor, mask_B1XT: torch.Tensor | None
) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries_BGXE, keys_BGTE, values_BGTE, attn_mask=mask_B1XT)


@dataclass(kw_only=True)
class AttentionGroup:
    """Segments attended in one call. `pad_rows` gathers their rows into [B, n] (a short segment
    repeats its last row), `real_rows` leaves the repeats out, `unpad_rows` says where the rest belongs."""

    rows: slice
    num_rows_each: int
    slots: slice | torch.Tensor
    length: int
    mask: torch.Tensor | None
    pad_rows: torch.Tensor | None = None
    unpad_rows: torch.Tensor | None = None
    real_rows: torch.Tensor | None = None


class Decoder:
    """A decoder with its KV cache behind the model step: `forward(token_ids_N, positions_N, slots_N, logit_rows_R)`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch_positions: int = 0,
    ) -> None:
        """`num_scratch_positions` of every slot, past its last one, may be written and are never read."""
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.num_slots, self.max_length = num_slots, max_length
        self.vocabulary_size = config.vocabulary_size
        self.rotary = RotaryTable(config, max_length + num_scratch_positions, dtype, device)
        self.cache = KVCache(
            num_layers=len(weights.layers),
            num_slots=num_slots,
            num_kv_heads=config.num_kv_heads,
            max_length=max_length + num_scratch_positions,
            head_width=config.head_width,
            dtype=dtype,
            device=device,
        )

    @torch.inference_mode()
    def forward(
        self, token_ids_N: list[int], positions_N: list[int], slots_N: list[int], logit_rows_R: list[int]
    ) -> StepOutput:
        """Write N tokens into their slots at their positions and return float32 logits at the rows asked for.

        Rows of one slot are adjacent and their positions consecutive. Prefill chunks, verification with different k
        and draft catch-up are all this call.
        """
        assert len(token_ids_N) == len(positions_N) == len(slots_N) > 0
        segments = split_into_segments(positions_N, slots_N)
        assert max(segment.length for segment in segments) <= self.max_length, "position past the cache"
        token_ids, positions = on_device(token_ids_N, self.device), on_device(positions_N, self.device)
        hidden_ND = F.embedding(token_ids, self.weights.embedding_VD)
        attend = self._attend_over_cache(segments, positions, slots_N)
        hidden_ND = run_layers(hidden_ND, positions, self.weights.layers, self.config, self.rotary, attend)
        if not logit_rows_R:
            return StepOutput(logits_RV=hidden_ND.new_empty(0, self.weights.head.weight.shape[0], dtype=torch.float32))
        if len(logit_rows_R) != len(token_ids_N):
            hidden_ND = hidden_ND[on_device(logit_rows_R, self.device)]
        hidden_RD = rms_norm(hidden_ND, self.weights.final_norm_D, self.config.norm_eps)
        return StepOutput(logits_RV=self.weights.head(hidden_RD).float(), hidden_RD=hidden_RD)

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        self.cache.clear(slot)

    @torch.inference_mode()
    def copy_slot(self, source: int, destination: int, num_positions: int) -> None:
        self.cache.copy(source, destination, num_positions)

    def _attend_over_cache(self, segments: list[Segment], positions_N: torch.Tensor, slots_N: list[int]) -> Attend:
        """Plan the attention once; the closure runs it in every layer."""
        cache = self.cache
        groups = [self._plan_group([s]) for s in segments if s.num_rows > MAX_ROWS_ATTENDED_TOGETHER]
        short = [s for s in segments if s.num_rows <= MAX_ROWS_ATTENDED_TOGETHER]
        if short:
            groups.append(self._plan_group(short))
        X = self.config.num_heads * self.config.head_width
        if len(segments) == 1:
            return self._attend_one_segment(segments[0], groups[0])
        slots = on_device(slots_N, self.device)

        def attend(
            layer: int, queries_NHE: torch.Tensor, keys_NGE: torch.Tensor, values_NGE: torch.Tensor
        ) -> torch.Tensor:
            keys_SGTE, values_SGTE = cache.keys[layer], cache.values[layer]
            keys_SGTE[slots, :, positions_N] = keys_NGE
            values_SGTE[slots, :, positions_N] = values_NGE
            attended_NX = queries_NHE.new_empty(queries_NHE.shape[0], X)
            for group in groups:
                rows = group.rows if group.unpad_rows is None else group.unpad_rows
                keys_BGTE, values_BGTE = (x[group.slots][:, :, : group.length] for x in (keys_SGTE, values_SGTE))
                attended_NX[rows] = attend_group(group, queries_NHE, keys_BGTE, values_BGTE)
            return attended_NX

        return attend

    def _attend_one_segment(self, segment: Segment, group: AttentionGroup) -> Attend:
        """The common case of batch 1, with every layer's slices made beforehand."""
        slot = slice(segment.slot, segment.slot + 1)
        written = self.cache.views(slot, slice(segment.first_position, segment.length))
        seen = self.cache.views(slot, slice(0, segment.length))

        def attend(
            layer: int, queries_NHE: torch.Tensor, keys_NGE: torch.Tensor, values_NGE: torch.Tensor
        ) -> torch.Tensor:
            new_keys_1GNE, new_values_1GNE = written[layer]
            new_keys_1GNE.copy_(keys_NGE.transpose(0, 1))
            new_values_1GNE.copy_(values_NGE.transpose(0, 1))
            return attend_group(group, queries_NHE, *seen[layer])

        return attend

    def _plan_group(self, segments: list[Segment]) -> AttentionGroup:
        n = max(s.num_rows for s in segments)
        length = max(s.length for s in segments)
        slot_ids = [s.slot for s in segments]
        slots: slice | torch.Tensor
        if slot_ids == list(range(slot_ids[0], slot_ids[0] + len(slot_ids))):
            slots = slice(slot_ids[0], slot_ids[-1] + 1)  # a view, no copy of the cache
        else:
            slots = on_device(slot_ids, self.device)
        group = AttentionGroup(
            rows=slice(segments[0].first_row, segments[0].first_row + n),
            num_rows_each=n,
            slots=slots,
            length=length,
            mask=None,
        )
        if len(segments) == 1 and n == 1:
            return group  # one row sees everything up to itself
        first_B = on_device([s.first_position for s in segments], self.device)
        offset_n = torch.arange(n, device=self.device)
        last_visible_Bn = first_B[:, None] + offset_n
        visible_BnT = torch.arange(length, device=self.device) <= last_visible_Bn[..., None]
        mask_BnT = torch.zeros(visible_BnT.shape, dtype=self.dtype, device=self.device)
        mask_BnT.masked_fill_(~visible_BnT, -torch.inf)
        # Query heads that share a key-value head are folded into the rows: [B, 1, (H/G) * n, T].
        group.mask = mask_BnT.repeat(1, self.config.num_query_heads_per_kv, 1).unsqueeze(1)
        counts = [s.num_rows for s in segments]
        is_contiguous = all(s.first_row == segments[0].first_row + n * index for index, s in enumerate(segments))
        if counts == [n] * len(segments) and is_contiguous:
            group.rows = slice(segments[0].first_row, segments[0].first_row + n * len(segments))
        else:
            # Listed on the host: a boolean mask on a GPU would have to be read back, in every layer.
            real = [(b, offset) for b, count in enumerate(counts) for offset in range(count)]
            padded = [s.first_row + min(offset, s.num_rows - 1) for s in segments for offset in range(n)]
            group.pad_rows = on_device(padded, self.device)
            group.unpad_rows = on_device([segments[b].first_row + offset for b, offset in real], self.device)
            if len(real) < len(padded):
                group.real_rows = on_device([b * n + offset for b, offset in real], self.device)
        return group


def attend_group(
    group: AttentionGroup,
    queries_NHE: torch.Tensor,
    keys_BGTE: torch.Tensor,
    values_BGTE: torch.Tensor,
    kernel: AttentionKernel = attend_by_sdpa,
) -> torch.Tensor:
    """Attention of one group's rows over its slots' keys and values; returns [rows, H * E] in row order."""
    B, G = keys_BGTE.shape[:2]
    H, E = queries_NHE.shape[1:]
    n = group.num_rows_each
    queries = queries_NHE[group.rows] if group.pad_rows is None else queries_NHE[group.pad_rows]
    if n == 1:  # the common case of plain decoding and drafting: no rows to fold, only views
        folded_BGXE = queries.reshape(B, G, H // G, E)
        return kernel(folded_BGXE, keys_BGTE, values_BGTE, group.mask).reshape(B, H * E)
    folded_BGXE = queries.reshape(B, n, G, H // G, E).permute(0, 2, 3, 1, 4).reshape(B, G, -1, E)
    attended = kernel(folded_BGXE, keys_BGTE, values_BGTE, group.mask)
    attended = attended.reshape(B, G, H // G, n, E).permute(0, 3, 1, 2, 4).reshape(B * n, H * E)
    return attended if group.real_rows is None else attended[group.real_rows]


def weight_tensors(weights: DecoderWeights) -> list[torch.Tensor]:
    """All of them, in one order for every model of a shape: what a swap in place copies."""
    tensors = [weights.embedding_VD, weights.final_norm_D, weights.head.weight]
    for layer in weights.layers:
        linears = (layer.query_key_value, layer.attention_output, layer.down)
        tensors += [layer.attention_norm_D, layer.feed_forward_norm_D, layer.gate_up.weight]
        tensors += [linear.weight for linear in linears]
        optional = (*(linear.bias for linear in linears), layer.query_norm_E, layer.key_norm_E)
        tensors += [tensor for tensor in optional if tensor is not None]
    return tensors
