"""The decoder's step in fixed shapes: what a CUDA graph can record. The plain `Decoder` is its slow twin.

A round's decoding rows are padded to (B slots, n rows each, T cache positions), the first B slots of the cache, whoever is in
them: keys and values are read as views, nothing is gathered. Rows that no request has are written to scratch positions past
the end of their slot, which no row ever attends to, and their results are not looked at. Longer segments, prompts mostly, go
through the plain decoder.

Legend: B slots, n rows of each, N = B * n, T cache positions, D width, V vocabulary, G key-value heads, E head width.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from livedraft.device import on_device
from livedraft.models.config import ModelConfig
from livedraft.models.decoder import (
    AttentionGroup,
    AttentionKernel,
    Decoder,
    DecoderWeights,
    attend_by_sdpa,
    attend_group,
    rms_norm,
    run_layers,
)
from livedraft.models.graphs import Capture, GraphLadder, Replay, StaticInput, steps_up_to
from livedraft.models.kv_cache import Segment, split_into_segments
from livedraft.models.step import StepOutput

ROWS_EACH = (1, 2, 3, 5, 9)
"""Rows of one request: k + 1, with k up to 8."""
MAX_DRAFTED = ROWS_EACH[-1] - 1
NUM_SCRATCH_POSITIONS = 16
"""More than the rows of any static step, so that padded rows do not meet."""
UNKNOWN = -1
"""In place of a token that is drafted on the device and not read back yet: taken from `proposed_Bn`."""
_MOST_ROWS = 512
"""Above that a pass is bound by arithmetic, and launching it eagerly costs nothing."""
_FIRST_CONTEXT = 128
_RECORD_SECONDS = 15.0
_USUAL_ROWS_EACH = 5
_ROUNDS_TIMED = 20
_CLEARLY_FASTER = 0.95
_SAME_LOGITS = 0.1
"""Of the largest logit, between two kernels in bf16."""


def attend_by_matmul(
    queries_BGXE: torch.Tensor, keys_BGTE: torch.Tensor, values_BGTE: torch.Tensor, mask_B1XT: torch.Tensor | None
) -> torch.Tensor:
    """Two batched products: with few heads and rows they spread over a GPU better than a fused kernel may."""
    scores_BGXT = queries_BGXE @ keys_BGTE.transpose(-1, -2) * queries_BGXE.shape[-1] ** -0.5
    if mask_B1XT is not None:
        scores_BGXT = scores_BGXT + mask_B1XT
    return scores_BGXT.softmax(-1, dtype=torch.float32).to(values_BGTE.dtype) @ values_BGTE


def attend_by_flex(
    queries_BGXE: torch.Tensor, keys_BGTE: torch.Tensor, values_BGTE: torch.Tensor, mask_B1XT: torch.Tensor
) -> torch.Tensor:
    """FlexAttention; slow unless compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    def masked(
        score: torch.Tensor, b: torch.Tensor, head: torch.Tensor, x: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        return score + mask_B1XT[b, 0, x, t]

    return flex_attention(queries_BGXE, keys_BGTE, values_BGTE, score_mod=masked)  # type: ignore[return-value]


def _compiled_flex() -> AttentionKernel:
    # One compilation for all shapes, or a start would compile for minutes; what does not compile whole is not a candidate.
    return torch.compile(attend_by_flex, dynamic=True, fullgraph=True)  # type: ignore[return-value]


class StaticDecoder(Decoder):
    """`Decoder` whose decoding steps are replayed. Prompts run through the plain one, on the same cache."""

    most_rows_each = ROWS_EACH[-1]

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        capture: Capture,
        attention: tuple[str, AttentionKernel] | None = None,
        seconds: float = _RECORD_SECONDS,
    ) -> None:
        """`attention`: a name and a kernel; None measures which is the fastest here. `seconds`: for recording."""
        super().__init__(
            config, weights, num_slots=num_slots, max_length=max_length, dtype=dtype, device=device,
            num_scratch_positions=NUM_SCRATCH_POSITIONS,
        )  # fmt: skip
        shapes = [
            (B, n, T)
            for B in steps_up_to(num_slots)
            for n in ROWS_EACH
            for T in steps_up_to(max_length, _FIRST_CONTEXT)
            if B * n <= _MOST_ROWS
        ]
        most_rows = max(B * n for B, n, _ in shapes)
        self.proposed_Bn = torch.zeros(num_slots, ROWS_EACH[-1], dtype=torch.int64, device=device)
        """Column i is the i-th token drafted for a slot in this round; column 0 is never read."""
        self._inputs = StaticInput(3 * most_rows, torch.int64, device)
        self._logits_NV = torch.zeros(most_rows, weights.head.weight.shape[0], dtype=torch.float32, device=device)
        self._positions_T = torch.arange(max_length, device=device)
        self.capture = capture
        usual = [shape for shape in shapes if shape[1] == _USUAL_ROWS_EACH]
        self.attention = attention or self._fastest_attention(usual[len(usual) // 2])
        self.ladder = GraphLadder(shapes, self._step, capture, seconds=seconds)

    def forward(
        self, token_ids_N: list[int], positions_N: list[int], slots_N: list[int], logit_rows_R: list[int]
    ) -> StepOutput:
        """As `Decoder.forward`. A token may be UNKNOWN where `take_proposed` has left it on the device."""
        assert len(token_ids_N) == len(positions_N) == len(slots_N) > 0
        segments = split_into_segments(positions_N, slots_N)
        assert max(segment.length for segment in segments) <= self.max_length, "position past the cache"
        static = [segment for segment in segments if segment.num_rows <= ROWS_EACH[-1]]
        found = self.ladder.covering(_shape_of(static)) if static else None
        if found is None:
            return super().forward(self._known(token_ids_N, segments), positions_N, slots_N, logit_rows_R)
        (B, n, _), replay = found
        tokens, positions = [0] * (B * n), [self.max_length + offset for _ in range(B) for offset in range(n)]
        static_rows: dict[int, int] = {}
        for segment in static:
            for offset in range(segment.num_rows):
                row, static_row = segment.first_row + offset, segment.slot * n + offset
                tokens[static_row], positions[static_row] = token_ids_N[row], positions_N[row]
                static_rows[row] = static_row
        asked = [static_rows[row] for row in logit_rows_R if row in static_rows]
        with torch.inference_mode():
            self._inputs.fill([*tokens, *positions, *asked])
            replay()
            start = 2 * B * n
            # A copy: the next replay overwrites the buffer.
            logits_RV = self._logits_NV.index_select(0, self._inputs.on_device[start : start + len(asked)])
        if len(static) == len(segments):
            return StepOutput(logits_RV=logits_RV)
        others = [row for row in range(len(token_ids_N)) if row not in static_rows]
        place = {row: index for index, row in enumerate(others)}
        asked_others = [place[row] for row in logit_rows_R if row in place]
        token_ids_N, positions_N, slots_N = (
            [values[row] for row in others] for values in (token_ids_N, positions_N, slots_N)
        )
        others_RV = super().forward(token_ids_N, positions_N, slots_N, asked_others).logits_RV
        if not asked_others:
            return StepOutput(logits_RV=logits_RV)
        order = sorted(range(len(logit_rows_R)), key=lambda index: logit_rows_R[index] in place)
        back = sorted(range(len(order)), key=order.__getitem__)
        with torch.inference_mode():
            return StepOutput(logits_RV=torch.cat([logits_RV, others_RV])[on_device(back, self.device)])

    def take_proposed(self, token_ids_kB: torch.Tensor, is_drafting_B: torch.Tensor) -> None:
        """Tokens just drafted for the first B slots, on the device: the next step reads them where its tokens are UNKNOWN."""
        k, B = token_ids_kB.shape
        proposed_Bk = self.proposed_Bn[:B, 1 : 1 + k]
        proposed_Bk.copy_(torch.where(is_drafting_B[:, None], token_ids_kB.T, proposed_Bk))

    def _known(self, token_ids_N: list[int], segments: list[Segment]) -> list[int]:
        """For the plain decoder: what is still on the device is read back."""
        if UNKNOWN not in token_ids_N:
            return token_ids_N
        proposed, known = self.proposed_Bn.tolist(), list(token_ids_N)
        for segment in segments:
            for offset in range(segment.num_rows):
                if known[segment.first_row + offset] == UNKNOWN:
                    known[segment.first_row + offset] = proposed[segment.slot][offset]
        return known

    # --- what is recorded -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self, B: int, n: int, T: int) -> None:
        N = B * n
        tokens_N, positions_N = self._inputs.on_device[:N], self._inputs.on_device[N : 2 * N]
        tokens_N = torch.where(tokens_N == UNKNOWN, self.proposed_Bn[:B, :n].reshape(-1), tokens_N)
        self._logits_NV[:N].copy_(self.logits(self.hidden_states(tokens_N, positions_N, B, n, T)))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """In the model's own dtype."""
        return self.weights.head(rms_norm(hidden_ND, self.weights.final_norm_D, self.config.norm_eps))

    def hidden_states(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, B: int, n: int, T: int) -> torch.Tensor:
        """[N, D] before the final norm: n rows of each of the first B slots, written into the cache and attending to its first
        T positions, as far as each row may see."""
        positions_Bn = positions_N.view(B, n)
        G, E = self.config.num_kv_heads, self.config.head_width
        mask_BnT = torch.zeros(B, n, T, dtype=self.dtype, device=self.device)
        mask_BnT.masked_fill_(self._positions_T[:T] > positions_Bn[..., None], -torch.inf)
        mask_B1XT = mask_BnT.repeat(1, self.config.num_query_heads_per_kv, 1).unsqueeze(1)
        group = AttentionGroup(rows=slice(0, B * n), num_rows_each=n, slots=slice(0, B), length=T, mask=mask_B1XT)
        written_BGnE = positions_Bn[:, None, :, None].expand(B, G, n, E)
        kernel = self.attention[1]

        def attend(
            layer: int, queries_NHE: torch.Tensor, keys_NGE: torch.Tensor, values_NGE: torch.Tensor
        ) -> torch.Tensor:
            keys_BGTE, values_BGTE = self.cache.keys[layer][:B], self.cache.values[layer][:B]
            keys_BGTE.scatter_(2, written_BGnE, keys_NGE.view(B, n, G, E).transpose(1, 2))
            values_BGTE.scatter_(2, written_BGnE, values_NGE.reshape(B, n, G, E).transpose(1, 2))
            return attend_group(group, queries_NHE, keys_BGTE[:, :, :T], values_BGTE[:, :, :T], kernel)

        hidden_ND = F.embedding(tokens_N, self.weights.embedding_VD)
        return run_layers(hidden_ND, positions_N, self.weights.layers, self.config, self.rotary, attend)

    def _fastest_attention(self, shape: tuple[int, int, int]) -> tuple[str, AttentionKernel]:
        """On this GPU; without one there is nothing to choose."""
        if self.device.type != "cuda":
            return "sdpa", attend_by_sdpa
        kernels = {"sdpa": attend_by_sdpa, "matmul": attend_by_matmul, "flex": _compiled_flex()}
        return self.measured_attention(shape, kernels, _seconds)

    @torch.inference_mode()
    def measured_attention(
        self, shape: tuple[int, int, int], kernels: dict[str, AttentionKernel], seconds_of: Callable[[Replay], float]
    ) -> tuple[str, AttentionKernel]:
        """Whole steps, recorded and timed: the first kernel, unless another is clearly faster and gives the same logits."""
        B, n, T = shape
        tokens = [row % self.vocabulary_size for row in range(B * n)]
        self._inputs.fill([*tokens, *(T - n + row % n for row in range(B * n))])
        best, chosen, reference_NV = 0.0, next(iter(kernels.items())), None
        for name, kernel in kernels.items():
            self.attention = name, kernel
            try:
                seconds = seconds_of(self.capture.capture(functools.partial(self._step, *shape)))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a kernel this GPU, or this torch, does not have
                continue
            logits_NV = self._logits_NV[: B * n].clone()
            if reference_NV is None:
                best, reference_NV = seconds, logits_NV
            difference = (logits_NV - reference_NV).abs().max() / reference_NV.abs().max()
            if bool(difference < _SAME_LOGITS) and seconds < _CLEARLY_FASTER * best:
                best, chosen = seconds, (name, kernel)
        return chosen


def _shape_of(segments: list[Segment]) -> tuple[int, int, int]:
    return max(s.slot for s in segments) + 1, max(s.num_rows for s in segments), max(s.length for s in segments)


def _seconds(replay: Replay) -> float:
    replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_ROUNDS_TIMED):
        replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started
