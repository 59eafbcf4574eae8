"""Collects one request's trace, round by round, from what verification computed anyway. No second pass of the target.

Legend: n committed positions of this round, V vocabulary, K teacher tokens, P drafted positions, Q draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from livedraft.records import DRAFT_TOP_K, TEACHER_TOP_K, Proposal, Trace

if TYPE_CHECKING:
    from livedraft.engine.request import RequestState


class TraceBuilder:
    """Holds lists of small arrays; `finish` joins them. Every parallel array is trimmed alike at commit."""

    def __init__(self) -> None:
        self._teacher_ids: list[np.ndarray] = []
        self._teacher_log_probs: list[np.ndarray] = []
        self._tail_mass: list[np.ndarray] = []
        self._round_numbers: list[int] = []
        self._versions: list[str] = []
        self._drafted: dict[str, list[np.ndarray]] = {name: [] for name in _DRAFTED_DTYPES}

    def add_round(
        self,
        *,
        target_logits_RV: torch.Tensor,
        proposal: Proposal | None,
        num_accepted: int,
        num_committed: int,
        is_cut: bool,
        first_position: int,
        round_number: int,
    ) -> None:
        """Record the `num_committed` positions this round produced, and every drafted position, rejected ones too.

        `is_cut`: the request ended inside the block, and drafted positions past its end are left out.
        """
        log_normaliser_R1 = torch.logsumexp(target_logits_RV, dim=-1, keepdim=True)
        top = target_logits_RV[:num_committed].topk(min(TEACHER_TOP_K, target_logits_RV.shape[-1]), dim=-1)
        log_probs_nK = top.values - log_normaliser_R1[:num_committed]
        self._teacher_ids.append(top.indices.int().cpu().numpy())
        self._teacher_log_probs.append(log_probs_nK.half().cpu().numpy())
        self._tail_mass.append((1.0 - log_probs_nK.exp().sum(-1)).clamp(min=0.0).cpu().numpy())
        self._round_numbers += [round_number] * num_committed
        # A client's prediction has no draft distribution and teaches nothing about the draft.
        has_draft = proposal is not None and proposal.draft_logits_KW is not None
        self._versions += [proposal.draft_version if has_draft and proposal else "none"] * num_committed
        if has_draft and proposal is not None:
            num_drafted = num_committed if is_cut else len(proposal.draft_token_ids)
            self._add_drafted(proposal, target_logits_RV, log_normaliser_R1, num_drafted, num_accepted, first_position)

    def _add_drafted(
        self,
        proposal: Proposal,
        target_logits_RV: torch.Tensor,
        log_normaliser_R1: torch.Tensor,
        P: int,
        num_accepted: int,
        first_position: int,
    ) -> None:
        assert proposal.draft_logits_KW is not None and proposal.draft_to_target_W is not None
        rows = torch.arange(P)
        log_probs_PW = torch.log_softmax(proposal.draft_logits_KW[:P], dim=-1)
        top = log_probs_PW.topk(min(DRAFT_TOP_K, log_probs_PW.shape[-1]), dim=-1)
        token_ids = torch.tensor(proposal.draft_token_ids[:P])
        index = np.arange(P)
        columns = {
            "position": first_position + index,
            "token_id": token_ids.numpy(),
            "log_prob": log_probs_PW[rows, torch.tensor(proposal.draft_row_ids[:P])].cpu().numpy(),
            "target_log_prob": (target_logits_RV[rows, token_ids] - log_normaliser_R1[:P, 0]).cpu().numpy(),
            "accepted": index < num_accepted,
            "off_path": index > num_accepted,
            "top_token_ids": proposal.draft_to_target_W[top.indices].cpu().numpy(),
            "top_log_probs": top.values.cpu().numpy(),
        }
        for name, column in columns.items():
            self._drafted[name].append(column.astype(_DRAFTED_DTYPES[name]))

    def finish(self, state: RequestState, target_fingerprint: str) -> Trace:
        T = state.num_output_tokens
        assert T == len(self._round_numbers) == len(self._versions), "parallel arrays must be trimmed alike"

        def drafted(name: str) -> np.ndarray:
            if self._drafted[name]:
                return np.concatenate(self._drafted[name])
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
            teacher_token_ids_TK=np.concatenate(self._teacher_ids),
            teacher_log_probs_TK=np.concatenate(self._teacher_log_probs),
            tail_mass_T=np.concatenate(self._tail_mass).astype(np.float32),
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
