"""What travels between rooms. Plain frozen records; no torch import at run time.

`engine` and `learning` never import each other: a served request crosses from one to the other as a `Trace`,
new draft weights cross back as a `DraftVersion` in the registry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch

TRACE_SCHEMA_VERSION = 1
TEACHER_TOP_K = 64
"""How many of the target's tokens a trace keeps at each output position."""
DRAFT_TOP_K = 8
"""How many of the draft's tokens a trace keeps at each drafted position."""


class UserError(Exception):
    """Something the user can mend. The message is one sentence that says what to do; the CLI prints it and nothing else."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. The same values act on the target and on the draft (lossless rule 1).

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 switch those filters off. `seed` makes the request
    reproducible token for token whatever else runs (lossless rule 7).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must lie in [0, 100], got {self.temperature}; use 0 for greedy.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a positive count, got {self.top_k}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}; use 1 to switch it off.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}; use 0 to switch it off.")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way to the engine. `store=False` keeps it out of the trace store."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    route: str = "default"
    store: bool = True
    conversation_key: str = ""
    """Keyed hash of the conversation's root (system and first user message); decides the held-out split."""


@dataclass(kw_only=True)
class Proposal:
    """What a proposer suggests for one request in one round.

    draft_probs_KV are the float32 probabilities the tokens were drawn from, over the draft vocabulary, kept at draw
    time (lossless rule 2); None means one-hot: a greedy request, or a proposer without probabilities (rule 4).
    draft_logits_KV are the raw logits behind them, for the trace only. draft_to_target_V gives the target id of each
    draft vocabulary row.
    """

    draft_token_ids: list[int]
    draft_version: str
    draft_row_ids: list[int] = field(default_factory=list)
    """The drafted tokens as rows of the draft vocabulary."""
    confidences: list[float] = field(default_factory=list)
    """The draft's own probability of each drafted token; empty where the draft length is fixed."""
    draft_probs_KV: torch.Tensor | None = None
    draft_logits_KV: torch.Tensor | None = None
    draft_to_target_V: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The target's answer to a proposal: the first `num_accepted` proposed tokens, then one recovered or bonus token."""

    num_accepted: int
    output_token_ids: list[int]


@dataclass(kw_only=True)
class Trace:
    """One served request with the target's verdicts: what learning reads. NumPy arrays on the CPU, never device tensors.

    T output positions, K teacher tokens (TEACHER_TOP_K), P drafted positions, Q draft tokens (DRAFT_TOP_K).
    Log-probabilities are raw: before temperature and filters.
    """

    request_id: str
    route: str
    target_fingerprint: str
    sampling: SamplingParams
    draft_version: str
    """The version in service when the request arrived; alpha is charged to it."""
    arrived_at: float
    conversation_key: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    teacher_token_ids_TK: numpy.ndarray  # int32
    teacher_log_probs_TK: numpy.ndarray  # float16
    tail_mass_T: numpy.ndarray  # float32
    round_number_T: numpy.ndarray  # int32
    position_version_T: list[str]
    drafted_position_P: numpy.ndarray  # int32, index of the output position the token was drafted for
    drafted_token_id_P: numpy.ndarray  # int32
    drafted_log_prob_P: numpy.ndarray  # float32, the draft's
    drafted_target_log_prob_P: numpy.ndarray  # float32
    drafted_accepted_P: numpy.ndarray  # bool
    drafted_off_path_P: numpy.ndarray  # bool, after the first rejection of its round
    draft_top_token_ids_PQ: numpy.ndarray  # int32
    draft_top_log_probs_PQ: numpy.ndarray  # float16


@dataclass(frozen=True, kw_only=True)
class DraftVersion:
    """One set of draft weights on disk. The folder holds `manifest.json` (these fields) and `draft.safetensors`."""

    id: str
    route: str
    parent: str | None
    sha256: str
    """Of draft.safetensors."""
    target_fingerprint: str
    tokenizer_fingerprint: str
    num_layers: int
    vocabulary_size: int
    created_at: float
    num_requests_seen: int = 0
    """Requests in the data window it was trained on."""
    last_trace_id: int = 0
    """The newest trace of that window: evidence for the gate must be newer or held out."""
    alpha: float | None = None
    """Measured by the gate, on evidence it has not trained on."""
