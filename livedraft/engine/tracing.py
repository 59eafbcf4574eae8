"""Collects one request's trace, round by round, from what verification computed anyway. No second pass of the target.

Legend: C committed positions of a round, V vocabulary, K teacher tokens, P drafted positions, Q draft tokens, W its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from livedraft.device import on_device
from livedraft.models.top_tokens import together, top_tokens
from livedraft.records import DRAFT_TOP_K, TEACHER_TOP_K, Proposal, Trace

if TYPE_CHECKING:
    from livedraft.engine.request import RequestState


class OnTheWay:
    """Columns that are being copied to the host, into pinned memory where they come from a GPU."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self._columns = {name: tensor.to("cpu", non_blocking=True) for name, tensor in columns.items()}
        self._copied = None
        if next(iter(columns.values())).is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def arrived(self) -> dict[str, np.ndarray]:
        """Waits for the copies alone, not for what the device was given after them."""
        if self._copied is not None:
            self._copied.synchronize()
        return {name: tensor.numpy() for name, tensor in self._columns.items()}


@dataclass(frozen=True, kw_only=True)
class TracedRound:
    """What one request's trace keeps of a round: the `num_committed` positions it produced, and every drafted position,
    rejected ones too. `is_cut`: the request ended inside the block, and drafted positions past its end are left out."""

    trace: TraceBuilder
    target_logits_RV: torch.Tensor
    proposal: Proposal | None
    num_accepted: int
    num_committed: int
    is_cut: bool
    first_position: int
    round_number: int

    @property
    def num_drafted(self) -> int:
        """0 for a client's prediction too: it has no draft distribution and teaches nothing about the draft."""
        if self.proposal is None or self.proposal.draft_logits_KW is None:
            return 0
        return self.num_committed if self.is_cut else len(self.proposal.draft_token_ids)


def record_rounds(rounds: Sequence[TracedRound]) -> None:
    """All requests' parts of a round, computed together. On a GPU nobody waits for the results: they are on their way to pinned
    memory, and each trace takes its own out later."""
    if not rounds:
        return
    top = top_tokens([one.target_logits_RV for one in rounds], [one.num_committed for one in rounds], TEACHER_TOP_K)
    teacher = OnTheWay(teacher_ids=top.token_ids_CK, teacher_log_probs=top.log_probs_CK, tail_mass=top.tail_mass_C)
    normalisers = top.normalisers_R.split([one.target_logits_RV.shape[0] for one in rounds])
    end = 0
    by_draft: dict[str, list[tuple[TracedRound, torch.Tensor]]] = {}
    for one, normaliser_R in zip(rounds, normalisers, strict=True):
        start, end = end, end + one.num_committed
        one.trace.expect(one, teacher, slice(start, end))
        if one.num_drafted and one.proposal is not None:
            by_draft.setdefault(one.proposal.draft_version, []).append((one, normaliser_R[: one.num_drafted]))
    for same_draft in by_draft.values():
        _record_drafted(same_draft)


def _record_drafted(rounds: list[tuple[TracedRound, torch.Tensor]]) -> None:
    """Of requests with one draft, each with the log normalisers of its drafted rows. P: drafted positions of all of them."""
    row_ids, token_ids, logits, target_logits = [], [], [], []
    for one, _ in rounds:
        assert one.proposal is not None and one.proposal.draft_logits_KW is not None
        count = one.num_drafted
        row_ids += one.proposal.draft_row_ids[:count]
        token_ids += one.proposal.draft_token_ids[:count]
        logits.append(one.proposal.draft_logits_KW[:count])
        target_logits.append(one.target_logits_RV[:count])
    log_probs_PW = torch.log_softmax(together(logits), dim=-1)
    target_logits_PV = together(target_logits)
    top = log_probs_PW.topk(min(DRAFT_TOP_K, log_probs_PW.shape[-1]), dim=-1)
    rows_P, tokens_P = on_device([*row_ids, *token_ids], target_logits_PV.device).chunk(2)
    proposal = rounds[0][0].proposal
    draft_to_target_W = proposal.draft_to_target_W if proposal else None
    assert draft_to_target_W is not None
    drafted = OnTheWay(
        log_prob=log_probs_PW.gather(-1, rows_P[:, None])[:, 0],
        target_log_prob=target_logits_PV.gather(-1, tokens_P[:, None])[:, 0]
        - together([normaliser_P for _, normaliser_P in rounds]),
        top_token_ids=draft_to_target_W[top.indices],
        top_log_probs=top.values,
    )
    end = 0
    for one, _ in rounds:
        start, end = end, end + one.num_drafted
        one.trace.expect_drafted(one, drafted, slice(start, end))


class TraceBuilder:
    """Holds lists of small arrays; `finish` joins them. Every parallel array is trimmed alike at commit."""

    def __init__(self) -> None:
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
        self._on_their_way: list[tuple[OnTheWay, slice]] = []
        """Parts of the last round."""
        self._round_numbers: list[int] = []
        self._versions: list[str] = []

    def expect(self, one: TracedRound, teacher: OnTheWay, rows: slice) -> None:
        self.take_in()
        self._on_their_way.append((teacher, rows))
        self._round_numbers += [one.round_number] * one.num_committed
        version = one.proposal.draft_version if one.num_drafted and one.proposal else "none"
        self._versions += [version] * one.num_committed

    def expect_drafted(self, one: TracedRound, drafted: OnTheWay, rows: slice) -> None:
        assert one.proposal is not None
        self._on_their_way.append((drafted, rows))
        index = np.arange(one.num_drafted)
        known = {
            "position": one.first_position + index,
            "token_id": np.array(one.proposal.draft_token_ids[: one.num_drafted]),
            "accepted": index < one.num_accepted,
            "off_path": index > one.num_accepted,
        }
        for name, column in known.items():
            self._columns[name].append(column.astype(_DTYPES[name]))

    def take_in(self) -> None:
        """Its own rows of the last round. Copies, for the whole round's arrays are large."""
        for columns, rows in self._on_their_way:
            for name, column in columns.arrived().items():
                self._columns[name].append(np.array(column[rows], dtype=_DTYPES[name]))
        self._on_their_way = []

    def finish(self, state: RequestState, target_fingerprint: str) -> Trace:
        T = state.num_output_tokens
        assert T == len(self._round_numbers) == len(self._versions), "parallel arrays must be trimmed alike"

        self.take_in()

        def drafted(name: str) -> np.ndarray:
            if self._columns[name]:
                return np.concatenate(self._columns[name])
            shape = (0, DRAFT_TOP_K) if name.startswith("top_") else (0,)
            return np.empty(shape, dtype=_DTYPES[name])

        return Trace(
            request_id=state.request.id,
            route=state.request.route,
            target_fingerprint=target_fingerprint,
            sampling=state.request.sampling,
            draft_version=state.draft_version_at_arrival,
            arrived_at=state.arrived_at,
            conversation_key=state.request.conversation_key,
            client_key=state.request.client_key,
            prompt_token_ids=list(state.request.prompt_token_ids),
            output_token_ids=state.output_token_ids,
            teacher_token_ids_TK=np.concatenate(self._columns["teacher_ids"]),
            teacher_log_probs_TK=np.concatenate(self._columns["teacher_log_probs"]),
            tail_mass_T=np.concatenate(self._columns["tail_mass"]),
            round_number_T=np.array(self._round_numbers, dtype=np.int32),
            position_version_T=self._versions,
            drafted_position_P=drafted("position"),
            drafted_token_id_P=drafted("token_id"),
            drafted_log_prob_P=drafted("log_prob"),
            drafted_target_log_prob_P=drafted("target_log_prob"),
            drafted_accepted_P=drafted("accepted"),
            drafted_off_path_P=drafted("off_path"),
            draft_top_token_ids_PQ=drafted("top_token_ids"),
            draft_top_log_probs_PQ=drafted("top_log_probs"),
        )


_DTYPES: dict[str, type] = {
    "teacher_ids": np.int32,
    "teacher_log_probs": np.float16,
    "tail_mass": np.float32,
    "position": np.int32,
    "token_id": np.int32,
    "log_prob": np.float32,
    "target_log_prob": np.float32,
    "accepted": np.bool_,
    "off_path": np.bool_,
    "top_token_ids": np.int32,
    "top_log_probs": np.float16,
}
