"""What travels between rooms: plain records, and the protocols two rooms meet at. No torch import at run time.

`engine` and `learning` never import each other: a served request crosses from one to the other as a `Trace`,
new draft weights cross back as a `DraftVersion` in the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy
    import torch

TRACE_SCHEMA_VERSION = 1
TEACHER_TOP_K = 64
"""How many of the target's tokens a trace keeps at each output position."""
DRAFT_TOP_K = 8
"""How many of the draft's tokens a trace keeps at each drafted position."""
EXPORTED_TARGET_KEY, EXPORTED_VERSION_KEY = "livedraft_target", "livedraft_version"
"""In the metadata of an exported draft: the fingerprint of the target it was trained for, and its version."""
EXPORTED_TOKENS_KEY = "livedraft_tokens"
"""And the target's tokens it knows, as JSON, where it is layers of the target: what is needed to make it one again."""
MAX_LOGPROBS = 20
"""The most alternatives a request may ask for at each output position, as in OpenAI's API."""


DEFAULT_ROUTE = "default"
"""Of all requests that belong to no other stream, or to one without a draft of its own."""
HELD_OUT_SHARE = 10
"""One conversation in so many is never learnt from: what a new draft is measured on."""


def is_held_out(conversation_key: str) -> bool:
    """Decided by the keyed hash alone, for good. A request without a conversation (no key) trains."""
    return bool(conversation_key) and int(conversation_key, 16) % HELD_OUT_SHARE == 0


class UserError(Exception):
    """Something the user can mend. The message is one sentence that says what to do; the CLI prints it and nothing else."""


class ContextTooLongError(ValueError):
    """The prompt and the tokens asked for do not fit the model's context."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. The same values act on the target and on the draft (lossless rule 1).

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 switch those filters off. `seed` makes the request
    reproducible token for token whatever else runs (lossless rule 7).

    presence_penalty and frequency_penalty count output tokens, repetition_penalty counts the prompt's too (1 is off);
    logit_bias holds (token id, addend) pairs. They act before temperature, in that order, position by position (rule 6).
    `stop`: strings that end the output; the text is cut before the string. `logprobs`: for every output token its raw
    log-probability (before temperature, penalties and masks) and those of this many most likely tokens; None is none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

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
        if not all(self.stop):
            raise ValueError("stop must not hold an empty string; leave it out.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must lie in [-2, 2], got {getattr(self, name)}; use 0 to switch it off.")
        if not 0.01 <= self.repetition_penalty <= 10.0:
            raise ValueError(
                f"repetition_penalty must lie in [0.01, 10], got {self.repetition_penalty}; use 1 to switch it off."
            )
        if not all(-100.0 <= addend <= 100.0 for _, addend in self.logit_bias):
            raise ValueError("logit_bias must lie in [-100, 100] for each token.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must lie in [0, {MAX_LOGPROBS}], got {self.logprobs}.")

    @property
    def is_greedy(self) -> bool:
        """Below the smallest temperature that float32 logits can be divided by, too."""
        return self.temperature < 1e-6

    @property
    def is_unseeded(self) -> bool:
        """Drawn at a temperature, with random numbers of the engine's own."""
        return not self.is_greedy and self.seed is None

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Grammar(Protocol):
    """What the next token may be, as a state that moves along the output. One instance a request."""

    def allowed_tokens(self) -> numpy.ndarray:
        """bool, one a token id; ids past its end are not allowed."""

    def advance(self, token_id: int) -> bool:
        """Take one token; False, and nothing changes, when the grammar does not allow it."""

    def retreat(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` advances."""

    def copy(self) -> Grammar:
        """In the same state, for another request."""


@dataclass(frozen=True, kw_only=True)
class RouteHints:
    """What is known of a request's origin beside its text."""

    named: str = ""
    """The client's own word for its stream of traffic."""
    api_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way to the engine. `store=False` keeps it out of the trace store."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    route: str = DEFAULT_ROUTE
    store: bool = True
    conversation_key: str = ""
    """Keyed hash of the conversation's root (system and first user message); decides the held-out split."""
    client_key: str = ""
    """Keyed hash of who asks, as the client named itself; empty when it did not."""
    num_speculative_tokens: int | None = None
    """At most this many drafted tokens a round for this request (0: decode plainly); None leaves it to the engine."""
    prediction_token_ids: tuple[int, ...] = ()
    """What the client expects the output to be; proposed where it fits what was generated so far."""
    grammar: Grammar | None = None


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Raw log-probabilities at one output position: the token's own, and the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def text_token_ids(
    token_ids: Sequence[int], finish_reason: FinishReason | None, stop_reason: int | str | None
) -> Sequence[int]:
    """Those of a request's last tokens that are text: end-of-sequence and stop tokens are counted and are none."""
    has_stop_token = finish_reason == "stop" and not isinstance(stop_reason, str)
    return token_ids[:-1] if has_stop_token else token_ids


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one round gave one request; handed over once a round. The last one has a finish_reason and the counts."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_drafted: int | None = None
    """Proposed in this round, of which the first `num_accepted` of `token_ids` were accepted; None where the backend does not
    say."""
    num_accepted: int = 0
    proposer: str | None = None
    """The draft's version, "suffix" or "prediction"; None when nothing was proposed."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """With finish_reason "stop": the stop string or stop token that ended it; None is end-of-sequence."""
    error: str | None = None
    """With finish_reason "error": one sentence for the client."""
    counts: RequestCounts | None = None


@dataclass(frozen=True, kw_only=True)
class RequestCounts:
    """One finished request's speculation, as the response reports it."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    """How many rounds with k >= 1 accepted 0, 1, 2 ... tokens."""
    num_target_passes: int
    num_emitted_tokens: int
    num_prediction_tokens: int
    num_accepted_prediction_tokens: int
    num_cached_prompt_tokens: int
    """Prompt tokens whose keys and values were copied from another request."""
    draft_version: str
    queued_seconds: float


class Backend(Protocol):
    """What the HTTP server needs of anything that serves: the engine in this process, or another one."""

    max_model_len: int
    vocabulary_size: int

    def check(self, request: Request) -> None:
        """Raises ValueError with a sentence for the client when the request cannot be served."""

    def submit(self, request: Request, deliver: Callable[[Update], None]) -> None:
        """Queue a request. `deliver` is called from the backend's thread, at most once a round, and must not block."""

    def cancel(self, request_id: str) -> None:
        """The client is gone. Its slot is free from the next round on; an unknown id is ignored."""

    def snapshot(self) -> dict[str, Any]:
        """Gauges and counters for /metrics and the banner."""

    def close(self) -> None:
        """Finish or cancel what runs and free the model."""


@dataclass(kw_only=True)
class Proposal:
    """What a proposer suggests for one request in one round.

    draft_probs_KW are the float32 probabilities the tokens were drawn from, over the draft vocabulary, kept at draw
    time (lossless rule 2); None means one-hot: a greedy request, or a proposer without probabilities (rule 4).
    draft_logits_KW are the raw logits behind them, for the trace only. draft_to_target_W gives the target id of each
    draft vocabulary row.
    """

    draft_token_ids: list[int]
    draft_version: str
    draft_row_ids: list[int] = field(default_factory=list)
    """The drafted tokens as rows of the draft vocabulary."""
    confidences: list[float] = field(default_factory=list)
    """The draft's own probability of each drafted token; empty where the draft length is fixed."""
    draft_probs_KW: torch.Tensor | None = None
    draft_logits_KW: torch.Tensor | None = None
    draft_to_target_W: torch.Tensor | None = None
    read_back: Callable[[], None] | None = None
    """Fills in the ids where they are still on the device; until then draft_token_ids only says how many there are."""

    def settle(self) -> None:
        """Have the ids here."""
        if self.read_back is not None:
            read_back, self.read_back = self.read_back, None
            read_back()


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
    client_key: str = ""


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
    data_sha256: str | None = None
    """Of the token ids that `distill` trained it on; None for one trained while serving, whose requests come and go."""
