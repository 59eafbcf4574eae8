"""Training a private copy of the draft on served traces. Live weights are never touched.

One optimiser step (`Trainer.step`):
  1. split the examples into micro-batches, and these into lanes that run side by side (`lanes.py`); between two of a lane
     the caller may yield to serving;
  2. run the draft over prompt + output, teacher-forced, with autograd (`forward.py`);
  3. logits only at the output positions, in chunks of rows;
  4. the loss against the target's own distribution at each position;
  5. one AdamW step on the mean over all positions of all micro-batches;
  6. the running average of the weights follows. Candidates are averages: at a constant rate on a stream the newest weights
     jump about, and their average is better by .03 to .09 in alpha (docs/experiments.md).

Legend: B sequences, T tokens, N loss positions, H heads, G key-value heads, E head width, D width, W draft vocabulary,
V target vocabulary, K teacher tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch

from livedraft.config import LEARNING_RATES, LearningConfig
from livedraft.device import available_memory_bytes, cpu_has_bf16_instructions
from livedraft.drafts.weights import DraftWeights
from livedraft.learning.batches import Example, TrainBatch, collate, micro_batches
from livedraft.learning.forward import Forward, TargetParts, forward_of
from livedraft.learning.lanes import run_lanes
from livedraft.learning.losses import compare, forward_kl, loss_function
from livedraft.learning.ranks import Ranks
from livedraft.learning.scoring import ROWS_PER_CHUNK, Score, Scorer, score_batches
from livedraft.learning.selection import Selection
from livedraft.learning.teacher import FullTeacher
from livedraft.records import UserError

_LOWEST_RATE = 0.2
"""Of the starting rate."""
EXPLODED_LOSS = 3.0
"""Times the loss of a uniform guess over the draft's vocabulary."""
_COPIES_IN_TRAINING = 5
"""Of a draft's weights: themselves, gradient, two moments, running average."""
_BETAS, _WEIGHT_DECAY, _MAX_GRADIENT_NORM = (0.9, 0.95), 0.0, 1.0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    loss: float
    alpha: float
    num_positions: int
    num_skipped: int
    """Positions whose target mass the draft's vocabulary hardly covers; they taught nothing."""
    num_selected: int
    """Positions the loss is the mean of: all, or those a reference selected."""


@dataclass(kw_only=True)
class _Sums:
    loss: float = 0.0
    """Of the positions that are used; `loss_of_all`: of the others too."""
    loss_of_all: float = 0.0
    overlap: float = 0.0
    num_taught: int = 0
    num_used: int = 0
    flops: float = 0.0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


class NotEnoughMemoryError(UserError):
    """For now: other processes may end."""


class BadStepError(ArithmeticError):
    """A step that would have ruined the weights."""


class Trainer:
    def __init__(
        self,
        *,
        config: LearningConfig,
        target: TargetParts,
        draft: DraftWeights,
        max_positions: int,
        teacher: FullTeacher | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`teacher`: the target itself, in place of the top tokens that examples keep. `ranks`: who else trains this draft."""
        self.config = config
        self.target = target
        self.teacher = teacher
        self.ranks = ranks or Ranks()
        self.max_positions = max_positions
        self.uses_bf16 = cpu_has_bf16_instructions()
        self.base_rate = config.learning_rate or LEARNING_RATES[0]
        self.flops = 0.0
        """Floating-point operations of training and scoring so far: 2 a weight and token forward, 4 backward."""
        self.restart_from(draft)

    def copy(self, config: LearningConfig) -> Trainer:
        """Another trainer that starts from the weights as they are, sharing what is frozen."""
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        made = Trainer(
            config=config,
            target=self.target,
            draft=replace(self._kind, tensors=weights, draft_to_target_W=self.draft_to_target_W),
            max_positions=self.max_positions,
            teacher=self.teacher,
            ranks=self.ranks,
        )
        made.uses_bf16 = self.uses_bf16
        return made

    def restart_from(self, draft: DraftWeights) -> None:
        """Train on from these weights, the optimiser's memory empty."""
        self._kind = replace(draft, tensors={})
        self._kind_inputs = draft.num_input_tokens
        self.parameters = {name: tensor.clone().requires_grad_() for name, tensor in draft.tensors.items()}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=self.base_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
        )
        self.averaged = {name: tensor.clone() for name, tensor in draft.tensors.items()}
        self.num_steps = self.schedule_step = 0
        self._set_vocabulary(draft.draft_to_target_W)

    @property
    def num_input_tokens(self) -> int:
        """Token ids below it can be read by the draft; a whole model may know fewer than the target."""
        return min(self.target.vocabulary_size, self._kind_inputs or self.target.vocabulary_size)

    # --- surviving a kill ---------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a step depends on: weights, their average, the optimiser's moments, the vocabulary."""
        tensors = {
            "draft_to_target": self.draft_to_target_W,
            "num_steps": torch.tensor(self.num_steps),
            "schedule_step": torch.tensor(self.schedule_step),
            "base_rate": torch.tensor(self.base_rate, dtype=torch.float64),
        }
        for name, parameter in self.parameters.items():
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors[f"averaged.{name}"] = self.averaged[name]
            for part, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{part}.{name}"] = value
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises KeyError for what `state_tensors` did not make."""
        names = [name.removeprefix("parameter.") for name in tensors if name.startswith("parameter.")]
        weights = {name: tensors[f"parameter.{name}"] for name in names}
        self.base_rate = float(tensors["base_rate"])
        self.restart_from(replace(self._kind, tensors=weights, draft_to_target_W=tensors["draft_to_target"]))
        self.averaged = {name: tensors[f"averaged.{name}"].clone() for name in names}
        self.num_steps, self.schedule_step = int(tensors["num_steps"]), int(tensors["schedule_step"])
        for name in names if self.num_steps else ():
            parts = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[self.parameters[name]] = {part: tensors[f"{part}.{name}"].clone() for part in parts}

    # --- learning ---------------------------------------------------------------------------------------------------

    def step(
        self,
        examples: Sequence[Example],
        between: Callable[[], None] = lambda: None,
        selection: Selection | None = None,
    ) -> StepReport:
        """One optimiser step; `between` is called between micro-batches. With a `selection` only the positions teach that its
        reference shows to be learnable. Where several processes train, `examples` is the whole batch in each.

        Raises BadStepError, the weights untouched, when the gradient is not finite or the loss is that of an exploded model.
        """
        num_positions = sum(int(example.loss_mask_T.sum()) for example in examples)
        sums = self._over_all_ranks(self._gradients(self.ranks.share(examples), num_positions, between, selection))
        self.flops += sums.flops
        if 0 < sums.num_used < num_positions:  # the mean over those that are used
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(num_positions / sums.num_used)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_GRADIENT_NORM)
        loss = sums.loss / max(1, sums.num_used)
        # Of all positions: those that a reference selects are the worst ones, and of an untrained draft they may be as bad.
        self._refuse_bad_step(norm, sums.loss_of_all / num_positions)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        self.schedule_step += 1
        # A short memory at first, or the average would cling to the untrained start.
        decay = min(self.config.averaging, (1 + self.schedule_step) / (4 + self.schedule_step))
        for name, parameter in self.parameters.items():
            self.averaged[name].lerp_(parameter.detach(), 1.0 - decay)
        return StepReport(
            loss=loss,
            alpha=sums.overlap / num_positions,
            num_positions=num_positions,
            num_skipped=num_positions - sums.num_taught,
            num_selected=sums.num_used,
        )

    def _gradients(
        self,
        examples: Sequence[Example],
        num_positions: int,
        between: Callable[[], None],
        selection: Selection | None,
    ) -> _Sums:
        """Into the parameters' `grad`, lane by lane in a fixed order: the same numbers in every run with as many threads."""
        batches = self._micro_batches(examples, self.config.micro_batch_tokens, is_window=selection is not None)
        num_lanes = self._num_lanes(self._kind, len(batches))
        # The same memory with gradients of its own.
        leaves = [
            {name: parameter.detach().requires_grad_() for name, parameter in self.parameters.items()}
            for _ in range(num_lanes)
        ]

        def lane(number: int) -> _Sums:
            return self._lane(leaves[number], batches[number::num_lanes], num_positions, between, selection)

        sums = run_lanes(num_lanes, lane)
        for name, parameter in self.parameters.items():
            gradients = [own[name].grad for own in leaves]
            parameter.grad = functools.reduce(_added, gradients)
        return sum(sums[1:], sums[0])

    def _lane(
        self,
        parameters: dict[str, torch.Tensor],
        batches: Sequence[list[Example]],
        num_positions: int,
        between: Callable[[], None],
        selection: Selection | None,
    ) -> _Sums:
        weights = self._forward(replace(self._kind, tensors=parameters, draft_to_target_W=self.draft_to_target_W))
        choice = None if selection is None else (selection, self._scorer(selection.reference))
        sums = _Sums()
        with self._autocast():  # one context for the whole step: the cast of each weight is made once
            for micro_batch in batches:
                batch = self._collated(micro_batch, self.target_to_draft_V)
                self._accumulate_gradients(batch, weights, num_positions, choice, sums)
                sums.flops += 6.0 * weights.num_weights * sum(example.num_tokens for example in micro_batch)
                between()
        return sums

    def _micro_batches(self, examples: Sequence[Example], most: int, *, is_window: bool) -> list[list[Example]]:
        """As even as the lanes want them; where a micro-batch is a window that positions are selected in, it does not depend on
        the machine."""
        if not is_window:
            padded = len(examples) * max((example.num_tokens for example in examples), default=0)
            most = min(most, -(-padded // torch.get_num_threads()))
        return micro_batches(examples, most)

    def _num_lanes(self, draft: DraftWeights, num_batches: int) -> int:
        """One where something is shared that changes: the full teacher's cache, the module of a draft of transformers'."""
        is_shared = self.teacher is not None or draft.hf_config is not None
        return 1 if is_shared else max(1, min(torch.get_num_threads(), num_batches))

    def _over_all_ranks(self, sums: _Sums) -> _Sums:
        if self.ranks.size == 1:
            return sums
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.add_up([parameter.grad for parameter in self.parameters.values() if parameter.grad is not None])
        mine = asdict(sums)
        totals = dict(zip(mine, self.ranks.total([float(value) for value in mine.values()]), strict=True))
        return _Sums(**{name: type(mine[name])(total) for name, total in totals.items()})

    def _refuse_bad_step(self, norm: torch.Tensor, loss: float) -> None:
        """One NaN would make every weight NaN for good; a loss far above that of a uniform guess comes from a model that has
        blown up. (No limit for losses that may be anything.)"""
        limit = EXPLODED_LOSS * math.log(len(self.draft_to_target_W) + 1)
        is_exploded = loss > limit and self.config.loss not in ("neg_log_alpha", "reverse_kl")
        if bool(torch.isfinite(norm)) and not is_exploded:
            return
        self.optimizer.zero_grad(set_to_none=True)
        if is_exploded:
            raise BadStepError(f"the loss is {loss:.1f}, which is far worse than a uniform guess")
        raise BadStepError(f"the gradient is not finite (loss {loss})")

    @property
    def learning_rate(self) -> float:
        """Of the coming step. Rising first, while the optimiser's moments are young; then constant; then falling with the
        root of the steps: a constant rate learns fast at the start of a stream and then stands still in its own noise
        (docs/experiments.md)."""
        warmup, start = self.config.warmup_steps, self.config.decay_from_step
        if self.num_steps < warmup:
            return self.base_rate * (self.num_steps + 1) / (warmup + 1)
        if start == 0 or self.schedule_step < start:
            return self.base_rate
        return self.base_rate * max(_LOWEST_RATE, (start / (self.schedule_step + 1)) ** 0.5)

    def restart_schedule(self) -> None:
        """The traffic has changed: the full rate and a short average again, the weights and their moments kept."""
        self.schedule_step = 0

    def _accumulate_gradients(
        self,
        batch: TrainBatch,
        weights: Forward,
        num_positions: int,
        choice: tuple[Selection, Scorer] | None,
        sums: _Sums,
    ) -> None:
        """The backward pass of each chunk of logits runs at once, down to the hidden states; only then the layers' own.
        So a single chunk of [rows, W] logits is ever held, and nothing is computed twice.
        """
        loss_of = loss_function(self.config.loss, jsd_beta=self.config.jsd_beta)
        hidden_ND = weights.hidden(batch.token_ids_BT)[batch.loss_rows_N]
        leaf_ND = hidden_ND.detach().requires_grad_()
        selected_N = None
        if choice is not None:
            selected_N = self._selected(batch, leaf_ND, weights, *choice)
            again = weights.num_head_weights + choice[1].weights.num_weights
            sums.flops += 2.0 * again * batch.num_tokens
        for start in range(0, leaf_ND.shape[0], ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            logits_NW = weights.head(leaf_ND[rows]).float()
            comparison = compare(
                logits_NW, batch.teacher_rows_NK[rows], batch.teacher_log_probs_NK[rows], batch.label_rows_N[rows]
            )
            teaches_N = comparison.teaches_N
            used_N = teaches_N if selected_N is None else teaches_N & selected_N[rows]
            # where, not a product: a position that teaches nothing may have an infinite loss.
            loss_N = loss_of(comparison)
            loss = torch.where(used_N, loss_N, 0.0).sum()
            (loss / num_positions).backward()
            sums.loss += loss.item()
            sums.loss_of_all += torch.where(teaches_N, loss_N.detach(), 0.0).sum().item()
            sums.overlap += comparison.overlap_N.detach().sum().item()
            sums.num_taught += int(teaches_N.sum())
            sums.num_used += int(used_N.sum()) if selected_N is not None else len(used_N)
        hidden_ND.backward(leaf_ND.grad)

    @torch.no_grad()
    def _selected(
        self, batch: TrainBatch, hidden_ND: torch.Tensor, weights: Forward, selection: Selection, reference: Scorer
    ) -> torch.Tensor:
        """Which rows of a micro-batch, the window that selection is made in, teach: those where the draft has most to gain by
        the reference's example (AdaSPEC, section 3.2)."""
        reference_hidden_ND = reference.weights.hidden(batch.token_ids_BT)[batch.loss_rows_N]
        reference_rows_NK = reference.lookup_V[batch.teacher_token_ids_NK]
        gains = []
        for start in range(0, hidden_ND.shape[0], ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            log_probs_NK = batch.teacher_log_probs_NK[rows]
            own = compare(weights.head(hidden_ND[rows]).float(), batch.teacher_rows_NK[rows], log_probs_NK)
            other = compare(
                reference.weights.head(reference_hidden_ND[rows]).float(), reference_rows_NK[rows], log_probs_NK
            )
            gains.append(torch.where(own.teaches_N, forward_kl(own) - forward_kl(other), -torch.inf))
        torch.clear_autocast_cache()  # casts made without gradients must not be reused by the pass that needs them
        keeps_N = selection.chosen(torch.cat(gains), seed=self.num_steps * 1_000_003 + int(batch.trace_ids_B[0]))
        if selection.control_share:
            keeps_N |= (batch.trace_ids_B % selection.control_share == 0)[batch.example_N]
        return keeps_N

    # --- scoring ----------------------------------------------------------------------------------------------------

    def score(
        self, examples: Sequence[Example], draft: DraftWeights | None = None, between: Callable[[], None] = lambda: None
    ) -> list[Score]:
        """Acceptance of each example under the given draft, or under what `snapshot` would give. In the order given."""
        draft = draft or replace(self._kind, tensors=self.averaged, draft_to_target_W=self.draft_to_target_W)
        scorer = self._scorer(draft)
        most = 4 * self.config.micro_batch_tokens  # a third of the work each
        batches = self._micro_batches(examples, most, is_window=False)
        num_lanes = self._num_lanes(draft, len(batches))

        def lane(number: int) -> dict[int, Score]:
            with torch.no_grad(), self._autocast():
                return score_batches(scorer, batches[number::num_lanes], self._collated, between)

        scores: dict[int, Score] = {}
        for own in run_lanes(num_lanes, lane):
            scores |= own
        self.flops += 2.0 * scorer.weights.num_weights * sum(example.num_tokens for example in examples)
        return [scores[id(example)] for example in examples]

    # --- the draft vocabulary ---------------------------------------------------------------------------------------

    def change_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Follow the traffic: rows stay with their token and its optimiser state; new rows start from the target's head. A
        whole model keeps the vocabulary it came with."""
        new_W = torch.tensor(sorted(set(token_ids)))
        if self._kind.is_whole_model or torch.equal(new_W, self.draft_to_target_W):
            return
        target_head_VD = self.target.head_VD
        assert target_head_VD is not None
        head = self.parameters["head"]
        old_rows_W = self.target_to_draft_V[new_W]
        is_known_W = old_rows_W >= 0

        def carried(head_WD: torch.Tensor) -> torch.Tensor:
            new_head_WD = target_head_VD[new_W].clone()
            new_head_WD[is_known_W] = head_WD[old_rows_W[is_known_W]]
            return new_head_WD

        self.averaged["head"] = carried(self.averaged["head"])
        new_parameter = carried(head.detach()).requires_grad_()
        state = self.optimizer.state.pop(head, None)
        if state is not None:
            for name in ("exp_avg", "exp_avg_sq"):
                moments_WD = torch.zeros_like(new_parameter, requires_grad=False)
                moments_WD[is_known_W] = state[name][old_rows_W[is_known_W]]
                state[name] = moments_WD
            self.optimizer.state[new_parameter] = state
        group = self.optimizer.param_groups[0]["params"]
        group[[parameter is head for parameter in group].index(True)] = new_parameter
        self.parameters["head"] = new_parameter
        self._set_vocabulary(new_W)

    def snapshot(self) -> DraftWeights:
        """A copy of the averaged weights as they are now."""
        tensors = {name: tensor.clone() for name, tensor in self.averaged.items()}
        return replace(self._kind, tensors=tensors, draft_to_target_W=self.draft_to_target_W.clone())

    def _set_vocabulary(self, draft_to_target_W: torch.Tensor) -> None:
        self.draft_to_target_W = draft_to_target_W
        self.target_to_draft_V = self._lookup(draft_to_target_W)

    def _lookup(self, draft_to_target_W: torch.Tensor) -> torch.Tensor:
        lookup_V = torch.full((self.target.vocabulary_size,), -1)
        lookup_V[draft_to_target_W] = torch.arange(len(draft_to_target_W))
        return lookup_V

    # --- the forward pass -------------------------------------------------------------------------------------------

    def _collated(
        self, examples: Sequence[Example], lookup_V: torch.Tensor, *, every_position: bool = False
    ) -> TrainBatch:
        batch = collate(examples, lookup_V, every_position=every_position)
        if self.teacher is None:
            return batch
        return self.teacher.in_full(batch, examples, lookup_V, every_position=every_position)

    def _scorer(self, draft: DraftWeights) -> Scorer:
        return Scorer(weights=self._forward(draft), lookup_V=self._lookup(draft.draft_to_target_W))

    def _forward(self, draft: DraftWeights) -> Forward:
        return forward_of(draft, self.target, self.max_positions)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.uses_bf16)


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Of two gradients; None is nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


def require_memory(draft: DraftWeights, config: LearningConfig) -> None:
    """Raises UserError with the number when training this draft would not fit into what the machine has free."""
    num_weights = sum(tensor.numel() for tensor in draft.tensors.values())
    num_trainers = len(LEARNING_RATES) if config.learning_rate is None else 1
    logits = 3 * ROWS_PER_CHUNK * max(draft.vocabulary_size, config.max_vocabulary_size)
    needed = 4 * (num_trainers * _COPIES_IN_TRAINING * num_weights + logits)
    free = available_memory_bytes()
    if needed > free:
        raise NotEnoughMemoryError(
            f"Training this draft needs about {needed / 2**30:.1f} GiB and the machine has {free / 2**30:.1f} free; take fewer "
            "num_draft_layers, a smaller max_vocabulary_size, or a fixed learning_rate."
        )
