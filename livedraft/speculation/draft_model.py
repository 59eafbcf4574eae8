"""A draft model that proposes token by token, with its own cache that may lag behind what is committed.

Why it lags: all drafted tokens were accepted (the last one was never fed), rounds with k = 0, a fresh slot, a swap.
One mechanism covers all: before drawing, every committed token the caches lack is written, at most MAX_CATCH_UP a
round, those that lack least first; until caught up the request's proposal is empty.

Legend: K drafted positions, W draft vocabulary, R rows of one step.
"""

from __future__ import annotations

import torch

from livedraft.models.step import ModelStep
from livedraft.models.top_tokens import best_tokens, probabilities_of
from livedraft.records import Proposal
from livedraft.sampling import DRAFT_DRAW, draw, logits_to_probs, uniform
from livedraft.speculation.proposer import ProposalTask
from livedraft.speculation.verify import gumbel_choice

Draw = tuple[int, torch.Tensor | None]
"""(draft row, the probabilities it was drawn from or None for a one-hot choice)."""
MAX_CATCH_UP = 512
"""Tokens written a round for all requests together, so a swap under long contexts does not stall anybody."""


class DraftModel:
    """One resident draft: weights, cache, and for each slot how many tokens its cache holds."""

    is_stepwise = True
    """Whether drafting can stop after any token; False where a whole loop of k steps is one piece of work."""

    def __init__(
        self,
        decoder: ModelStep,
        draft_to_target_W: torch.Tensor,
        *,
        version: str,
        keep_logits: bool = False,
        target_vocabulary_size: int | None = None,
    ) -> None:
        """`target_vocabulary_size` where it differs from the decoder's own: families pad their vocabularies differently."""
        self.decoder = decoder
        self.target_vocabulary_size = target_vocabulary_size or decoder.vocabulary_size
        self.version = version
        self.keep_logits = keep_logits
        self.draft_to_target_W = draft_to_target_W.to(decoder.device)
        self._target_ids = draft_to_target_W.tolist()
        self.lengths = [0] * decoder.num_slots
        self.num_rows = 0
        """Rows of all passes so far: what drafting cost."""

    @property
    def max_length(self) -> int:
        """Positions its cache has: a request longer than this decodes plainly."""
        return self.decoder.max_length

    def propose_ahead(self, tasks: list[ProposalTask]) -> list[Proposal]:
        """Here every token is read back before the next is drawn: nothing stays on the device."""
        return self.propose(tasks)

    def propose(self, tasks: list[ProposalTask]) -> list[Proposal]:
        """Draw up to `num_tokens` for each task; one whose cache has not caught up gets an empty proposal.

        1. Write what each cache lacks; the last committed token's row gives the first draft distribution.
        2. Draw one token for each request, feed it back, until each has its number or the chance that all of it is
           accepted has become too small. A drawn token is always kept (lossless rule 3).
        """
        proposals = [
            Proposal(draft_token_ids=[], draft_version=self.version, draft_to_target_W=self.draft_to_target_W)
            for _ in tasks
        ]
        kept: list[list[torch.Tensor]] = [[] for _ in tasks]  # logits or probs of each drawn token
        kept_logits: list[list[torch.Tensor]] = [[] for _ in tasks]
        reach = [1.0] * len(tasks)  # chance that everything drafted so far is accepted
        active, logits_RW = self._catch_up(tasks)
        while active:
            draws = self._draw(logits_RW, [tasks[index] for index in active], [proposals[index] for index in active])
            confidences = None
            if any(tasks[i].stop_below for i in active):  # at temperature 1 and before penalties
                confidences = probabilities_of(logits_RW, [drawn[0] if drawn else 0 for drawn in draws])
            going_on = []
            for row, index in enumerate(active):
                if draws[row] is None:
                    continue
                row_id, probs_W = draws[row]
                proposals[index].draft_row_ids.append(row_id)
                proposals[index].draft_token_ids.append(self._target_ids[row_id])
                if probs_W is not None:
                    kept[index].append(probs_W)
                if self.keep_logits:
                    kept_logits[index].append(logits_RW[row])
                task, num_drafted, next_chance = tasks[index], len(proposals[index].draft_token_ids), 1.0
                if confidences is not None:
                    proposals[index].confidences.append(confidences[row])
                    chance, next_chance = task.chances_of(confidences[row])
                    reach[index] *= chance
                is_full = num_drafted == task.num_tokens
                if not is_full and (
                    not task.stop_below or reach[index] * next_chance >= task.stop_below[num_drafted - 1]
                ):
                    going_on.append(index)
            active = going_on
            if active:
                slots = [tasks[index].slot for index in active]
                token_ids = [proposals[index].draft_token_ids[-1] for index in active]
                positions = [self.lengths[slot] for slot in slots]
                logits_RW = self._forward(token_ids, positions, slots, list(range(len(active))))
                for slot in slots:
                    self.lengths[slot] += 1
        for index, proposal in enumerate(proposals):
            if kept[index]:
                proposal.draft_probs_KW = torch.stack(kept[index])
            if kept_logits[index]:
                proposal.draft_logits_KW = torch.stack(kept_logits[index])
        return proposals

    def _catch_up(self, tasks: list[ProposalTask]) -> tuple[list[int], torch.Tensor]:
        """Write committed tokens the caches lack; return the tasks ready to draw and their logits."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        ready: list[int] = []
        lags = [len(task.token_ids) - self.lengths[task.slot] if task.num_tokens else 0 for task in tasks]
        shares = shares_of(lags, MAX_CATCH_UP)
        for index, task in enumerate(tasks):
            start = self.lengths[task.slot]
            lacking = task.token_ids[start : start + shares[index]]
            if lacking and max(lacking) >= self.decoder.vocabulary_size:
                continue  # a whole model may know fewer tokens than the target: this request decodes plainly
            end = start + len(lacking)
            token_ids += lacking
            positions += range(start, end)
            slots += [task.slot] * len(lacking)
            self.lengths[task.slot] = end
            if lacking and end == len(task.token_ids):
                ready.append(index)
                logit_rows.append(len(token_ids) - 1)
        if not token_ids:
            return [], torch.empty(0)
        return ready, self._forward(token_ids, positions, slots, logit_rows)

    def _forward(
        self, token_ids: list[int], positions: list[int], slots: list[int], logit_rows: list[int]
    ) -> torch.Tensor:
        self.num_rows += len(token_ids)
        logits_RW = self.decoder.forward(token_ids, positions, slots, logit_rows).logits_RV
        W = len(self._target_ids)
        return logits_RW if logits_RW.shape[-1] == W else logits_RW[:, :W]  # padded rows are never tokens

    def _draw(self, logits_RW: torch.Tensor, tasks: list[ProposalTask], proposals: list[Proposal]) -> list[Draw | None]:
        """One a row; None where nothing the request allows is in the draft's vocabulary."""
        if all(task.sampling.is_greedy and task.prefix is None for task in tasks):
            return [(row_id, None) for row_id in best_tokens([logits_RW])[1]]
        return [
            self._draw_one(logits_RW[row : row + 1], task, proposal.draft_token_ids)
            for row, (task, proposal) in enumerate(zip(tasks, proposals, strict=True))
        ]

    def _draw_one(self, logits_1W: torch.Tensor, task: ProposalTask, drafted: list[int]) -> Draw | None:
        if task.prefix is not None:
            try:
                logits_1W = task.prefix.adjust(logits_1W, drafted, self.draft_to_target_W)
            except Exception:  # the target's rows meet the same error, and there it fails this request alone
                return None
            if not torch.isfinite(logits_1W.max()):
                return None
        position = len(task.token_ids) + len(drafted) - task.num_prompt_tokens
        if task.sampling.is_greedy:
            return int(logits_1W.argmax()), None
        if task.sampling.seed is None:
            probs_W = logits_to_probs(logits_1W, task.sampling)[0]
            return draw(probs_W, uniform(task.seed, position, DRAFT_DRAW)), probs_W
        choice = gumbel_choice(
            logits_1W,
            task.sampling,
            task.seed,
            position,
            target_vocabulary_size=self.target_vocabulary_size,
            draft_to_target_W=self.draft_to_target_W,
        )
        return choice[0], None

    def time_steps(self, batch: int, position: int, num_steps: int) -> None:
        """Draft so many tokens of `batch` requests as in a round, the choice included; for measuring, on idle slots."""
        tokens, positions, slots = [0] * batch, [position] * batch, list(range(batch))
        for _ in range(num_steps):
            best_tokens([self.decoder.forward(tokens, positions, slots, slots).logits_RV])

    def commit(self, slot: int, num_valid_tokens: int) -> None:
        """Forget what was written past the committed tokens; the last committed one is always fed again or first."""
        self.lengths[slot] = min(self.lengths[slot], num_valid_tokens)

    def release(self, slot: int) -> None:
        self.lengths[slot] = 0

    def adopt(self, source: int, destination: int, num_tokens: int) -> None:
        """Start the destination from the source's first tokens, as far as this draft has written them."""
        num_tokens = min(num_tokens, self.lengths[source])
        if num_tokens:
            self.decoder.copy_slot(source, destination, num_tokens)
        self.lengths[destination] = num_tokens


def shares_of(lags: list[int], budget: int) -> list[int]:
    """How much each request catches up: the shortest lags first, so that most requests can draft."""
    shares = [0] * len(lags)
    for index in sorted(range(len(lags)), key=lags.__getitem__):
        shares[index] = min(lags[index], budget)
        budget -= shares[index]
    return shares
