"""Collects one request's trace, round by round, from what verification computed anyway. No second pass of the target.

Legend: n committed positions of this round, V vocabulary, K teacher tokens, P drafted positions, Q draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from livedraft.device import on_device
from livedraft.records import DRAFT_TOP_K, TEACHER_TOP_K, Proposal, Trace

if TYPE_CHECKING:
    from livedraft.engine.request import RequestState


@dataclass(frozen=True, kw_only=True)
class TeacherRows:
    """What traces keep of the target's rows of one round, all requests together. On a GPU the host copies are still on their
    way: nobody waits for them before a trace is finished."""

    ids_RK: torch.Tensor
    log_probs_RK: torch.Tensor
    tail_mass_R: torch.Tensor
    log_normaliser_R1: torch.Tensor  # on the logits' device

    @classmethod
    def of(cls, logits_RV: torch.Tensor) -> TeacherRows:
        log_normaliser_R1 = torch.logsumexp(logits_RV, dim=-1, keepdim=True)
        top = logits_RV.topk(min(TEACHER_TOP_K, logits_RV.shape[-1]), dim=-1)
        log_probs_RK = top.values - log_normaliser_R1
        return cls(
            ids_RK=_to_host(top.indices.int()),
            log_probs_RK=_to_host(log_probs_RK.half()),
            tail_mass_R=_to_host((1.0 - log_probs_RK.exp().sum(-1)).clamp(min=0.0)),
            log_normaliser_R1=log_normaliser_R1,
        )

    def __getitem__(self, rows: slice) -> TeacherRows:
        return TeacherRows(**{name: tensor[rows] for name, tensor in vars(self).items()})


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Into pinned memory and without waiting, where it comes from a GPU."""
    return tensor.to("cpu", non_blocking=True)


class TraceBuilder:
    """Holds lists of small arrays; `finish` joins them. Every parallel array is trimmed alike at commit."""

    def __init__(self) -> None:
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in _TEACHER_DTYPES | _DRAFTED_DTYPES}
        self._on_their_way: dict[str, torch.Tensor] = {}
        """The last round's, which a GPU may still be copying."""
        self._round_numbers: list[int] = []
        self._versions: list[str] = []
        self._device = torch.device("cpu")

    def add_round(
        self,
        *,
        target_logits_RV: torch.Tensor,
        teacher: TeacherRows,
        proposal: Proposal | None,
        num_accepted: int,
        num_committed: int,
        is_cut: bool,
        first_position: int,
        round_number: int,
    ) -> None:
        """Record the `num_committed` positions this round produced, and every drafted position, rejected ones too. `teacher`
        is of the same rows as `target_logits_RV`.

        `is_cut`: the request ended inside the block, and drafted positions past its end are left out.
        """
        self._take_in()  # they have arrived: this round's verdict came after them
        self._device = target_logits_RV.device
        self._on_their_way = {
            "teacher_ids": teacher.ids_RK[:num_committed],
            "teacher_log_probs": teacher.log_probs_RK[:num_committed],
            "tail_mass": teacher.tail_mass_R[:num_committed],
        }
        self._round_numbers += [round_number] * num_committed
        # A client's prediction has no draft distribution and teaches nothing about the draft.
        has_draft = proposal is not None and proposal.draft_logits_KW is not None
        self._versions += [proposal.draft_version if has_draft and proposal else "none"] * num_committed
        if has_draft and proposal is not None:
            num_drafted = num_committed if is_cut else len(proposal.draft_token_ids)
            self._add_drafted(proposal, target_logits_RV, teacher, num_drafted, num_accepted, first_position)

    def _add_drafted(
        self,
        proposal: Proposal,
        target_logits_RV: torch.Tensor,
        teacher: TeacherRows,
        P: int,
        num_accepted: int,
        first_position: int,
    ) -> None:
        assert proposal.draft_logits_KW is not None and proposal.draft_to_target_W is not None
        log_probs_PW = torch.log_softmax(proposal.draft_logits_KW[:P], dim=-1)
        top = log_probs_PW.topk(min(DRAFT_TOP_K, log_probs_PW.shape[-1]), dim=-1)
        row_ids_P1 = on_device(proposal.draft_row_ids[:P], self._device)[:, None]
        token_ids_P1 = on_device(proposal.draft_token_ids[:P], self._device)[:, None]
        target_log_probs_P1 = target_logits_RV[:P].gather(-1, token_ids_P1) - teacher.log_normaliser_R1[:P]
        index = torch.arange(P)
        self._on_their_way |= {
            "position": first_position + index,
            "token_id": torch.tensor(proposal.draft_token_ids[:P]),
            "log_prob": _to_host(log_probs_PW.gather(-1, row_ids_P1)[:, 0]),
            "target_log_prob": _to_host(target_log_probs_P1[:, 0]),
            "accepted": index < num_accepted,
            "off_path": index > num_accepted,
            "top_token_ids": _to_host(proposal.draft_to_target_W[top.indices]),
            "top_log_probs": _to_host(top.values),
        }

    def _take_in(self) -> None:
        """Copies: the rows are parts of what a round gave all requests, and pinned on a GPU."""
        for name, tensor in self._on_their_way.items():
            self._columns[name].append(np.array(tensor.numpy(), dtype=(_TEACHER_DTYPES | _DRAFTED_DTYPES)[name]))
        self._on_their_way = {}

    def finish(self, state: RequestState, target_fingerprint: str) -> Trace:
        T = state.num_output_tokens
        assert T == len(self._round_numbers) == len(self._versions), "parallel arrays must be trimmed alike"

        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the copies of the last round
        self._take_in()

        def drafted(name: str) -> np.ndarray:
            if self._columns[name]:
                return np.concatenate(self._columns[name])
            shape = (0, DRAFT_TOP_K) if name.startswith("top_") else (0,)
            return np.empty(shape, dtype=_DRAFTED_DTYPES[name])

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


_TEACHER_DTYPES: dict[str, type] = {"teacher_ids": np.int32, "teacher_log_probs": np.float16, "tail_mass": np.float32}
_DRAFTED_DTYPES: dict[str, type] = {
    "position": np.int32,
    "token_id": np.int32,
    "log_prob": np.float32,
    "target_log_prob": np.float32,
    "accepted": np.bool_,
    "off_path": np.bool_,
    "top_token_ids": np.int32,
    "top_log_probs": np.float16,
}
