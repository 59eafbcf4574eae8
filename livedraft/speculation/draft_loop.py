"""A draft whose whole loop of k steps, choice of tokens included, is one replayed graph; and the slots such drafts live in.

Nothing is read back between the steps: the random numbers are drawn beforehand, by counter as everywhere (lossless rule 7),
and go in as inputs. The drafted tokens stay on the device for the target's pass; they are read back with its verdict.
`DraftModel` is the slow twin, and still drafts for requests with filters, penalties or a grammar.

A slot is one draft's weights, cache and graphs, at addresses that stay. A new version of the same shape is copied into a slot
nobody drafts with, whose graphs exist already.

Legend: B slots of the cache, k drafted tokens, F rows of the first step, C rows of the head (W of them real), T positions.
"""

from __future__ import annotations

import copy
import threading
import weakref
from dataclasses import replace
from functools import partial

import torch

from livedraft.models.config import ModelConfig
from livedraft.models.decoder import DecoderWeights, Linear, weight_tensors
from livedraft.models.graphs import GraphLadder, HostCopy, StaticInput, steps_up_to
from livedraft.models.static_decoder import MAX_DRAFTED, UNKNOWN, StaticDecoder
from livedraft.records import Proposal
from livedraft.sampling import DRAFT_DRAW, at_temperature, draw_rows, gumbel_noise, uniform
from livedraft.speculation.draft_model import MAX_CATCH_UP, DraftModel, shares_of
from livedraft.speculation.proposer import ProposalTask

_FIRST_ROWS = 2
"""Committed tokens that the loop's first step writes: a cache lags by two where all drafted tokens were accepted."""
_LENGTHS = (1, 2, 3, 4, 6, MAX_DRAFTED)
_NO_REQUEST, _GREEDY, _DRAWN, _SHARED_NOISE = -1, 0, 1, 2
_GREEDY_LOOP, _SAMPLED_LOOP = 1, 2
"""Kinds of loops: the second can do what the first can."""
_HEAD_STEP = 1024
_MOST_ROWS = 512
_FIRST_CONTEXT, _CONTEXT_FACTOR = 128, 4
_RECORD_SECONDS, _STEPWISE_RECORD_SECONDS = 6.0, 2.0


class DraftLoop:
    """One slot for drafts: weights, cache, inputs, outputs and graphs."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        target: StaticDecoder,
        draft_to_target_W: torch.Tensor,
    ) -> None:
        device, dtype = target.device, target.dtype
        max_length = min(target.max_length, config.max_positions)
        C = -(-len(draft_to_target_W) // _HEAD_STEP) * _HEAD_STEP
        head = Linear(torch.zeros(C, weights.head.weight.shape[1], dtype=dtype, device=device))
        embedding_VD = target.weights.embedding_VD
        self._shares_embedding = weights.embedding_VD is embedding_VD
        # Copies, for later versions are written over them; all but the target's embedding.
        own = copy.deepcopy(replace(weights, head=head), {id(embedding_VD): embedding_VD})
        self.decoder = StaticDecoder(
            config, own, num_slots=target.num_slots, max_length=max_length, dtype=dtype, device=device, capture=target.capture,
            attention=target.attention, seconds=_STEPWISE_RECORD_SECONDS,
        )  # fmt: skip
        self.lent_to: weakref.ref[DraftModel] | None = None
        B = min(target.num_slots, _MOST_ROWS)
        self._target_ids_C = torch.zeros(C, dtype=torch.int64, device=device)
        self._is_padding_C = torch.ones(C, dtype=torch.bool, device=device)
        self.inputs = StaticInput(B * (2 * _FIRST_ROWS + 1), torch.int64, device)
        self.chances = StaticInput(B * (MAX_DRAFTED + 1), torch.float64, device)
        """Temperatures, then uniform numbers of each step."""
        self.noise_kBC = torch.zeros(MAX_DRAFTED, B, C, device=device)
        self.logits_kBC = torch.zeros(MAX_DRAFTED, B, C, device=device)
        self.probs_kBC = torch.zeros(MAX_DRAFTED, B, C, device=device)
        self.rows = torch.zeros(MAX_DRAFTED * B, dtype=torch.int64, device=device)
        self.target_ids = torch.zeros(MAX_DRAFTED * B, dtype=torch.int64, device=device)
        self.load(weights, draft_to_target_W)
        shapes = [
            (kind, slots, k, T)
            for kind in (_GREEDY_LOOP, _SAMPLED_LOOP)
            for slots in steps_up_to(B)
            for k in _LENGTHS
            for T in steps_up_to(max_length, _FIRST_CONTEXT, _CONTEXT_FACTOR)
        ]
        self.ladder = GraphLadder(shapes, self._loop, target.capture, seconds=_RECORD_SECONDS)

    @property
    def is_spare(self) -> bool:
        return self.lent_to is None or self.lent_to() is None

    def fits(self, config: ModelConfig, weights: DecoderWeights, target: StaticDecoder) -> bool:
        own = self.decoder.weights
        return (
            config == self.decoder.config
            and len(weights.layers) == len(own.layers)
            and weights.head.weight.shape[0] <= own.head.weight.shape[0]
            and (weights.embedding_VD is target.weights.embedding_VD) == self._shares_embedding
        )

    @torch.inference_mode()
    def load(self, weights: DecoderWeights, draft_to_target_W: torch.Tensor) -> None:
        """In place, while nobody drafts with this slot."""
        own, W = self.decoder.weights, len(draft_to_target_W)
        self.draft_to_target_W = draft_to_target_W
        own.head.weight.zero_()
        own.head.weight[:W].copy_(weights.head.weight)
        others = weight_tensors(replace(own, head=weights.head)), weight_tensors(weights)
        for ours, theirs in zip(*others, strict=True):
            if ours is not theirs:
                ours.copy_(theirs)
        self._target_ids_C[:W].copy_(draft_to_target_W)
        self._is_padding_C.fill_(True)
        self._is_padding_C[:W] = False

    @torch.inference_mode()
    def _loop(self, kind: int, B: int, k: int, T: int) -> None:
        decoder, F = self.decoder, _FIRST_ROWS
        tokens, positions, kinds_B = self.inputs.on_device[: B * (2 * F + 1)].split([B * F, B * F, B])
        temperature_B1 = self.chances.on_device[:B, None].float()
        last_BD = decoder.hidden_states(tokens, positions, B, F, T).view(B, F, -1)[:, -1]
        position_B = positions.view(B, F)[:, -1]
        for step in range(k):
            logits_BC = decoder.logits(last_BD).float().masked_fill_(self._is_padding_C, -torch.inf)
            self.logits_kBC[step, :B].copy_(logits_BC)
            row_B = logits_BC.argmax(-1)
            if kind == _SAMPLED_LOOP:
                scaled_BC = at_temperature(logits_BC, temperature_B1)
                probs_BC = scaled_BC.softmax(-1)
                self.probs_kBC[step, :B].copy_(probs_BC)
                drawn_B = draw_rows(probs_BC, self.chances.on_device[(step + 1) * B : (step + 2) * B])
                shared_B = (scaled_BC + self.noise_kBC[step, :B]).argmax(-1)
                row_B = torch.where(kinds_B == _DRAWN, drawn_B, torch.where(kinds_B == _SHARED_NOISE, shared_B, row_B))
            token_B = self._target_ids_C.index_select(0, row_B)
            self.rows[step * B : (step + 1) * B].copy_(row_B)
            self.target_ids[step * B : (step + 1) * B].copy_(token_B)
            if step + 1 < k:
                position_B = position_B + 1
                last_BD = decoder.hidden_states(token_B, position_B, B, 1, T)


class LoopedDraftModel(DraftModel):
    """`DraftModel` over a `DraftLoop`."""

    is_stepwise = False

    def __init__(
        self,
        loop: DraftLoop,
        target: StaticDecoder,
        draft_to_target_W: torch.Tensor,
        *,
        version: str,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(
            loop.decoder, draft_to_target_W, version=version, keep_logits=keep_logits,
            target_vocabulary_size=target.vocabulary_size,
        )  # fmt: skip
        self._loop, self._target = loop, target
        self._target_ids_W = draft_to_target_W.cpu()

    def propose(self, tasks: list[ProposalTask]) -> list[Proposal]:
        proposals = self.propose_ahead(tasks)
        for proposal in proposals:
            proposal.settle()
        return proposals

    def propose_ahead(self, tasks: list[ProposalTask]) -> list[Proposal]:
        """As `propose`, but drafted tokens may still be on the device: UNKNOWN here, and the target's next step has them."""
        is_looped = [self._can_loop(task) for task in tasks]
        looped = iter(self._propose_by_loop([task for task, loops in zip(tasks, is_looped, strict=True) if loops]))
        stepwise = iter(super().propose([task for task, loops in zip(tasks, is_looped, strict=True) if not loops]))
        return [next(looped if loops else stepwise) for loops in is_looped]

    def time_steps(self, batch: int, position: int, num_steps: int) -> None:
        found = self._loop.ladder.covering((_GREEDY_LOOP, batch, num_steps, position + num_steps))
        assert found is not None
        (_, B, _, _), replay = found
        positions = [position] * (B * _FIRST_ROWS)
        self._loop.inputs.fill([0] * (B * _FIRST_ROWS) + positions + [_GREEDY] * B)
        replay()

    def _can_loop(self, task: ProposalTask) -> bool:
        sampling = task.sampling
        has_filters = not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
        is_known = max(task.token_ids[self.lengths[task.slot] :], default=0) < self.decoder.vocabulary_size
        return (
            task.prefix is None
            and not has_filters
            and not task.stop_below
            and 0 < task.num_tokens <= MAX_DRAFTED
            and task.slot < self._loop.noise_kBC.shape[1]
            and is_known
        )

    def _propose_by_loop(self, tasks: list[ProposalTask]) -> list[Proposal]:
        proposals = [
            Proposal(draft_token_ids=[], draft_version=self.version, draft_to_target_W=self.draft_to_target_W)
            for _ in tasks
        ]
        self._shorten_lags(tasks)
        lags = [len(task.token_ids) - self.lengths[task.slot] for task in tasks]
        ready = [index for index, lag in enumerate(lags) if 0 < lag <= _FIRST_ROWS]
        if ready:
            self._replay([tasks[index] for index in ready], [proposals[index] for index in ready])
        return proposals

    def _shorten_lags(self, tasks: list[ProposalTask]) -> None:
        """Write what the loop's first step does not, within the round's budget."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lags = [max(0, len(task.token_ids) - self.lengths[task.slot] - _FIRST_ROWS) for task in tasks]
        for task, share in zip(tasks, shares_of(lags, MAX_CATCH_UP), strict=True):
            start = self.lengths[task.slot]
            token_ids += task.token_ids[start : start + share]
            positions += range(start, start + share)
            slots += [task.slot] * share
            self.lengths[task.slot] += share
        if token_ids:
            self.num_rows += len(token_ids)
            self.decoder.forward(token_ids, positions, slots, [])

    def _replay(self, tasks: list[ProposalTask], proposals: list[Proposal]) -> None:
        loop, F = self._loop, _FIRST_ROWS
        longest = max(task.num_tokens for task in tasks)
        is_sampled = not all(task.sampling.is_greedy for task in tasks)
        last = max(len(task.token_ids) + task.num_tokens - 1 for task in tasks)
        found = loop.ladder.covering(
            (
                _SAMPLED_LOOP if is_sampled else _GREEDY_LOOP,
                max(task.slot for task in tasks) + 1,
                longest,
                min(last, self.max_length),
            )
        )
        assert found is not None, "the ladder reaches to every slot and position"
        (_, B, k, _), replay = found
        tokens = [0] * (B * F)
        positions = [self.max_length + offset for _ in range(B) for offset in range(F)]
        kinds = [_NO_REQUEST] * B
        for task in tasks:
            lag = len(task.token_ids) - self.lengths[task.slot]
            end = (task.slot + 1) * F
            tokens[end - lag : end] = task.token_ids[-lag:]
            positions[end - lag : end] = range(len(task.token_ids) - lag, len(task.token_ids))
            kinds[task.slot] = _kind_of(task)
        with torch.inference_mode():
            if is_sampled:
                self._fill_chances(tasks, B, k)
            loop.inputs.fill([*tokens, *positions, *kinds])
            replay()
            read = HostCopy(loop.rows[: k * B])
            kinds_B = loop.inputs.on_device[2 * B * F : 2 * B * F + B]
            self._target.take_proposed(loop.target_ids[: k * B].view(k, B), kinds_B != _NO_REQUEST)
        W = len(self._target_ids)
        for task, proposal in zip(tasks, proposals, strict=True):
            n, slot = task.num_tokens, task.slot
            self.num_rows += len(task.token_ids) - self.lengths[slot] + n - 1
            self.lengths[slot] = len(task.token_ids) + n - 1
            proposal.draft_token_ids = [UNKNOWN] * n
            proposal.read_back = partial(self._read_back, proposal, read, slot, B)
            if _kind_of(task) == _DRAWN:
                proposal.draft_probs_KW = loop.probs_kBC[:n, slot, :W]
            if self.keep_logits:
                proposal.draft_logits_KW = loop.logits_kBC[:n, slot, :W]

    def _read_back(self, proposal: Proposal, read: HostCopy, slot: int, B: int) -> None:
        rows = [read.values[step * B + slot] for step in range(len(proposal.draft_token_ids))]
        proposal.draft_row_ids = rows
        proposal.draft_token_ids = [self._target_ids[row] for row in rows]

    def _fill_chances(self, tasks: list[ProposalTask], B: int, k: int) -> None:
        """Temperatures and uniform numbers of all; noise of the requests that share it with the target."""
        chances = [1.0] * B + [0.0] * (B * k)
        for task in tasks:
            kind, first = _kind_of(task), len(task.token_ids) - task.num_prompt_tokens
            if kind == _GREEDY:
                continue
            chances[task.slot] = task.sampling.temperature
            if kind == _DRAWN:
                for step in range(task.num_tokens):
                    chances[(step + 1) * B + task.slot] = uniform(task.seed, first + step, DRAFT_DRAW)
                continue
            noise_kV = gumbel_noise(task.seed, range(first, first + task.num_tokens), self.target_vocabulary_size)
            noise_kW = noise_kV[:, self._target_ids_W]
            noise_kW = noise_kW.pin_memory() if self.decoder.device.type == "cuda" else noise_kW
            self._loop.noise_kBC[: task.num_tokens, task.slot, : noise_kW.shape[1]].copy_(noise_kW, non_blocking=True)
        self._loop.chances.fill(chances)


def _kind_of(task: ProposalTask) -> int:
    if task.sampling.is_greedy:
        return _GREEDY
    return _DRAWN if task.sampling.seed is None else _SHARED_NOISE


class DraftSlots:
    """All slots of one target. A slot is spare once nothing holds the draft it was lent to."""

    def __init__(self, target: StaticDecoder) -> None:
        self._target = target
        self._loops: list[DraftLoop] = []
        self._lock = threading.Lock()

    @property
    def num_slots(self) -> int:
        return len(self._loops)

    def lend(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        draft_to_target_W: torch.Tensor,
        *,
        version: str,
        keep_logits: bool,
    ) -> LoopedDraftModel:
        """A resident draft of these weights, in a spare slot of its shape or in a new one."""
        with self._lock:
            spares = (one for one in self._loops if one.is_spare and one.fits(config, weights, self._target))
            loop = next(spares, None)
            if loop is None:
                loop = self._made(config, weights, draft_to_target_W)
            else:
                loop.load(weights, draft_to_target_W)
            draft = LoopedDraftModel(loop, self._target, draft_to_target_W, version=version, keep_logits=keep_logits)
            loop.lent_to = weakref.ref(draft)
            return draft

    def reserve(self, count: int) -> None:
        """So many more slots like the first, for versions to come, so that none has to be recorded while requests run."""
        with self._lock:
            for _ in range(count if self._loops else 0):
                first = self._loops[0]
                W = len(first.draft_to_target_W)
                weights = replace(first.decoder.weights, head=Linear(first.decoder.weights.head.weight[:W]))
                self._made(first.decoder.config, weights, first.draft_to_target_W)

    def _made(self, config: ModelConfig, weights: DecoderWeights, draft_to_target_W: torch.Tensor) -> DraftLoop:
        self._loops.append(DraftLoop(config, weights, self._target, draft_to_target_W))
        return self._loops[-1]
