"""One small frozen dataclass a room. Each field has code that reads it and a test that it matters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Loss = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha", "hybrid", "cross_entropy"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
RouteKind = Literal["api_key", "system_prompt", "language", "topic"]
LEARNING_RATES = (3e-3, 1e-3)
"""What a stream's own rate is chosen from where none is given."""


ROUTE_NAME_RULE = "1 to 40 lower-case letters, digits, dashes and underscores"


def is_route_name(name: str) -> bool:
    return re.fullmatch(r"[a-z0-9_-]{1,40}", name) is not None


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    max_num_seqs: int = 16
    """Most requests decoded together; each holds one KV slot. Fewer where kv_cache_gb does not hold that many."""
    num_prefix_slots: int = 4
    """Slots that keep what finished requests wrote, for requests that begin alike (chat turns, system prompts)."""
    kv_cache_gb: float | None = None
    """Memory budget of all KV slots, target and draft, in GiB; None is half of what the machine has free."""
    max_model_len: int = 2048
    """Longest prompt plus output, in tokens. KV memory grows with it only as it is used."""
    prefill_token_budget: int = 256
    """Prompt tokens processed in one round beside the running requests, so a long prompt does not stall them."""
    isolation: Literal["shared", "client"] = "shared"
    """client: what a request leaves behind (keys and values of its beginning, text for suffix proposals) serves that client's
    later requests alone; clients that do not name themselves leave nothing."""

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, f"max_num_seqs must be at least 1, got {self.max_num_seqs}.")
        _require(self.num_prefix_slots >= 0, f"num_prefix_slots must not be negative, got {self.num_prefix_slots}.")
        _require(
            self.kv_cache_gb is None or self.kv_cache_gb > 0, f"kv_cache_gb must be above 0, got {self.kv_cache_gb}."
        )
        _require(self.isolation in ("shared", "client"), f"isolation must be shared or client, got {self.isolation!r}.")
        _require(self.max_model_len >= 2, f"max_model_len must be at least 2, got {self.max_model_len}.")
        _require(
            self.prefill_token_budget >= 1, f"prefill_token_budget must be at least 1, got {self.prefill_token_budget}."
        )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    method: Literal["draft_model", "suffix", "none"] = "draft_model"
    """suffix needs no draft: it proposes what followed the same tokens before. none decodes plainly."""
    suffix_decoding: bool = True
    """With draft_model: propose from suffixes too, where that is worth more than the draft's guess."""
    suffix_traffic_tokens: int = 500_000
    """Tokens of finished requests kept in memory to find suffixes in; 0 looks at each request's own text alone."""
    num_speculative_tokens: int | None = None
    """Fixed draft length for every round; None lets the cost model choose, 0 included."""
    max_num_speculative_tokens: int = 8
    """The longest the cost model may choose."""
    num_draft_layers: int = 2
    """Layers of the target that a fresh draft starts from."""
    draft_quantization: Literal["auto", "none", "int8"] = "auto"
    """Of draft weights in service: int8 halves what a draft step costs and can only cost acceptance; auto is int8 where it
    can run."""
    draft_vocabulary_size: int = 8192
    """Rows of an untrained draft's trimmed head: the lowest token ids."""

    def __post_init__(self) -> None:
        _require(
            self.method in ("draft_model", "suffix", "none"),
            f"method must be draft_model, suffix or none, got {self.method!r}.",
        )
        _require(
            self.suffix_traffic_tokens >= 0,
            f"suffix_traffic_tokens must not be negative, got {self.suffix_traffic_tokens}.",
        )
        _require(
            self.draft_quantization in ("auto", "none", "int8"),
            f"draft_quantization must be auto, none or int8, got {self.draft_quantization!r}.",
        )
        k = self.num_speculative_tokens
        _require(k is None or 0 <= k <= 32, f"num_speculative_tokens must lie in 0..32 or be left out, got {k}.")
        _require(
            1 <= self.max_num_speculative_tokens <= 32,
            f"max_num_speculative_tokens must lie in 1..32, got {self.max_num_speculative_tokens}.",
        )
        _require(self.num_draft_layers >= 1, f"num_draft_layers must be at least 1, got {self.num_draft_layers}.")
        _require(
            self.draft_vocabulary_size >= 1,
            f"draft_vocabulary_size must be at least 1, got {self.draft_vocabulary_size}.",
        )

    @property
    def uses_draft(self) -> bool:
        return self.method == "draft_model"

    @property
    def uses_suffixes(self) -> bool:
        return self.method == "suffix" or (self.method == "draft_model" and self.suffix_decoding)


@dataclass(frozen=True, kw_only=True)
class LearningConfig:
    level: Literal["gentle", "on", "eager"] = "gentle"
    """How much training takes while requests run: what serving leaves, some, all it can. `gentle` also keeps training below
    30 % of serving's operations and scores a sample of the requests only. Idle compute is used at every level."""
    loss: Loss = "hybrid"
    """What is minimised; `livedraft/learning/losses.py` defines each."""
    jsd_beta: float = 0.5
    """Of the loss jsd: the target's share of the mixture that both are compared with, and the weight of its own side."""
    learning_rate: float | None = None
    """At the start, and again when the traffic changes; None tries a few rates on the first requests and keeps the best."""
    warmup_steps: int = 5
    """First steps, over which the rate rises to its full height."""
    decay_from_step: int = 80
    """From here on the rate falls with the root of the steps, to a fifth at the lowest; 0 keeps it constant."""
    traces_per_chunk: int = 2
    """New requests gathered for one optimiser step (OSD's interval I, paper section 4)."""
    replay_per_new: int = 3
    """Old requests mixed in for each new one."""
    averaging: float = 0.99
    """Longest memory of the running average of the weights that candidates are made of: the last third of all steps, until
    that is longer than this. 0 offers the newest weights."""
    replay_spacing: float = 0.1
    """Between two passes over a request lies this share of all requests trained on so far."""
    max_passes: int = 4
    """At most this many copies of one prompt ever train."""
    traces_per_candidate: int = 12
    """Fewest new training requests between two candidates offered to the gate; later a quarter of all it was trained on,
    because each test is paid for in significance and a little more data changes little."""
    max_vocabulary_size: int = 8192
    """The most rows a draft's head may have."""
    num_threads: int = 1
    """Of the training process; it waits passively and runs at idle priority."""
    micro_batch_tokens: int = 512
    """Tokens in one forward and backward; short enough that the trainer can yield between two."""
    positions: Literal["all", "rejected"] = "all"
    """Which output positions teach; `rejected` is OSD's own variant: the correction of each round."""
    select_fraction: float = 1.0
    """Share of the positions that teach, chosen by AdaSPEC's rule; 1 keeps all."""
    seed: int = 0
    """Of the order of requests and of ties between them."""
    memory_only: bool = False
    """Traces live in memory (tmpfs) and are gone when the server ends."""
    redact: str | None = None
    """A function `module:name` that is asked about every trace before it is stored: f(prompt, output) returns how many
    characters of the output may be kept, 0 for nothing at all, None for everything."""
    max_store_gb: float = 2.0
    """Traces on disk; the oldest go first."""
    max_trace_age_days: float = 30.0
    """Older traces are deleted."""

    def __post_init__(self) -> None:
        _require(self.level in ("gentle", "on", "eager"), f"level must be gentle, on or eager, got {self.level!r}.")
        _require(self.loss in LOSSES, f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}.")
        rate = self.learning_rate
        _require(rate is None or 0.0 < rate < 1.0, f"learning_rate must lie in (0, 1) or be left out, got {rate}.")
        _require(0.0 < self.jsd_beta < 1.0, f"jsd_beta must lie in (0, 1), got {self.jsd_beta}.")
        _require(self.warmup_steps >= 0, f"warmup_steps must not be negative, got {self.warmup_steps}.")
        _require(0.0 < self.select_fraction <= 1.0, f"select_fraction must lie in (0, 1], got {self.select_fraction}.")
        _require(
            self.redact is None or self.redact.count(":") == 1,
            f"redact must name a function as module:name, got {self.redact!r}.",
        )
        _require(self.decay_from_step >= 0, f"decay_from_step must not be negative, got {self.decay_from_step}.")
        _require(0.0 <= self.averaging < 1.0, f"averaging must lie in [0, 1), got {self.averaging}.")
        _require(self.positions in ("all", "rejected"), f"positions must be all or rejected, got {self.positions!r}.")
        for name in (
            "traces_per_chunk",
            "max_passes",
            "traces_per_candidate",
            "max_vocabulary_size",
            "num_threads",
            "micro_batch_tokens",
        ):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("max_store_gb", "max_trace_age_days"):
            _require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}.")
        _require(0.0 <= self.replay_spacing < 1.0, f"replay_spacing must lie in [0, 1), got {self.replay_spacing}.")
        _require(self.replay_per_new >= 0, f"replay_per_new must not be negative, got {self.replay_per_new}.")


@dataclass(frozen=True, kw_only=True)
class RouteRule:
    """Requests to which all that is given applies go to `route`."""

    route: str
    api_key: str | None = None
    """One of the server's api_keys."""
    language: str | None = None
    """As ISO 639 has it: en, de, ja."""
    system_prompt_contains: str | None = None

    def __post_init__(self) -> None:
        _require(is_route_name(self.route), f"route must be {ROUTE_NAME_RULE}, got {self.route!r}.")
        conditions = (self.api_key, self.language, self.system_prompt_contains)
        _require(any(conditions), "a rule needs api_key, language or system_prompt_contains.")


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Which requests get a draft of their own."""

    enabled: bool = True
    """false: one draft for everything, whatever clients say."""
    by: tuple[RouteKind, ...] = ()
    """What streams of traffic are told apart by, in this order, where neither a client's own word nor a rule says it; none of
    them unless asked for: what it gains depends on the traffic (`bench routes`)."""
    rules: tuple[RouteRule, ...] = ()
    """Tables [[routing.rules]]; the first one that fits decides."""
    main_language: str = "en"
    """Its requests are told apart by topic, those of other languages by language."""
    num_topics: int = 8
    """Clusters of first messages that are told apart."""
    max_drafts: int = 12
    """The most routes with a draft of their own; each costs memory in training and in serving."""
    min_requests: int = 24
    """Requests of a stream before it may get a draft of its own, which starts as a copy: early costs memory alone."""
    idle_days: float = 7.0
    """A route without a request for so long gives its draft's place up."""

    def __post_init__(self) -> None:
        kinds = get_args(RouteKind)
        _require(set(self.by) <= set(kinds), f"by may hold {', '.join(kinds)}, got {self.by!r}.")
        for name in ("num_topics", "max_drafts", "min_requests"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        _require(self.idle_days > 0, f"idle_days must be above 0, got {self.idle_days}.")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Offline distillation (`livedraft distill`)."""

    method: Literal["distillspec", "adaspec"] = "adaspec"
    """adaspec trains the DistillSpec draft first, as its reference, and reports both."""
    loss: Loss = "forward_kl"
    """What is minimised; `livedraft/learning/losses.py` defines each."""
    jsd_beta: float = 0.5
    """Of the loss jsd: the target's share of the mixture that both are compared with, and the weight of its own side."""
    epochs: int = 3
    """Passes over the responses."""
    reference_epochs: int | None = None
    """Of the DistillSpec run that an AdaSPEC run starts with; None is as many as `epochs`."""
    batch_size: int = 8
    """Requests a step, over all processes."""
    learning_rate: float = 3e-3
    """At its highest."""
    warmup_steps: int = 5
    """First steps, over which the rate rises to its full height."""
    decay_from_step: int = 80
    """From here on the rate falls with the root of the steps; 0 keeps it constant."""
    averaging: float = 0.99
    """Longest memory of the running average of the weights that the result is; 0 takes the last ones."""
    select_fraction: float = 0.4
    """Share of each window's positions that AdaSPEC keeps."""
    select: Literal["top", "bottom", "random"] = "top"
    """Largest gains, smallest gains, or any: the paper's ablations."""
    rescale_rate: bool = True
    """The learning rate times the fraction kept, as published: a step then teaches from that much less."""
    source: Literal["target", "student", "mix"] = "target"
    """Whose texts are learnt from. The draft's own are written afresh at the start of each epoch and judged by the target."""
    mix_level: Literal["token", "request"] = "request"
    """What is mixed: texts, or the tokens within each."""
    student_share: float = 0.5
    """Of the texts or tokens of a mixture."""
    teacher: Literal["top", "full"] = "top"
    """The target's 64 likeliest tokens at each position, kept with the responses; or all, from the target in memory."""
    temperature: float = 0.0
    """That responses are drawn at."""
    max_tokens: int = 128
    """Longest response."""
    validation_share: float = 0.1
    """Of the prompts, chosen by their text; never trained on."""
    validate_steps: int = 50
    """Steps between two looks at the prompts kept back."""
    checkpoint_steps: int = 50
    """Steps that a kill costs at most."""
    save_steps: int = 0
    """Keep the draft of every so many steps, to compare runs at equal work; 0 keeps the last one."""
    micro_batch_tokens: int = 2048
    """Tokens in one forward and backward: memory grows with it."""
    seed: int = 0
    """Fixes order, draws and random choices."""

    def __post_init__(self) -> None:
        choices = {
            "method": ("distillspec", "adaspec"), "loss": LOSSES, "select": ("top", "bottom", "random"),
            "source": ("target", "student", "mix"), "mix_level": ("token", "request"), "teacher": ("top", "full"),
        }  # fmt: skip
        for name, allowed in choices.items():
            _require(
                getattr(self, name) in allowed,
                f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.",
            )
        for name in ("epochs", "batch_size", "validate_steps", "checkpoint_steps", "micro_batch_tokens", "max_tokens"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("warmup_steps", "decay_from_step", "save_steps"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}.")
        epochs = self.reference_epochs
        _require(epochs is None or epochs >= 1, f"reference_epochs must be at least 1, got {epochs}.")
        _require(0.0 < self.learning_rate < 1.0, f"learning_rate must lie in (0, 1), got {self.learning_rate}.")
        _require(0.0 < self.jsd_beta < 1.0, f"jsd_beta must lie in (0, 1), got {self.jsd_beta}.")
        _require(0.0 <= self.averaging < 1.0, f"averaging must lie in [0, 1), got {self.averaging}.")
        _require(0.0 < self.select_fraction <= 1.0, f"select_fraction must lie in (0, 1], got {self.select_fraction}.")
        _require(0.0 < self.student_share < 1.0, f"student_share must lie in (0, 1), got {self.student_share}.")
        share = self.validation_share
        _require(0.0 < share < 1.0, f"validation_share must lie in (0, 1), got {share}.")
        _require(0.0 <= self.temperature <= 100.0, f"temperature must lie in [0, 100], got {self.temperature}.")

    @property
    def learning(self) -> LearningConfig:
        """What the trainer reads."""
        return LearningConfig(
            loss=self.loss, jsd_beta=self.jsd_beta, learning_rate=self.learning_rate, warmup_steps=self.warmup_steps,
            decay_from_step=self.decay_from_step, averaging=self.averaging, micro_batch_tokens=self.micro_batch_tokens,
            seed=self.seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DistillRunConfig:
    """What `livedraft distill` works on. Exactly one of `prompts` and `traces` is given."""

    target: str = "smollm2-135m"
    """A pulled name, a folder, a .gguf file, or a name on the Hugging Face hub."""
    draft: str = "auto"
    """auto takes layers of the target; else a draft's folder, or a small model with the same tokenizer (folder or hub name)."""
    draft_layers: int = 2
    """Of an auto draft."""
    max_vocabulary_size: int = 8192
    """The most rows an auto draft's head may have; the responses choose which."""
    prompts: str | None = None
    """A JSON lines file with `messages` or `turns`, or hub:DATASET:CONFIG:SPLIT:PROMPT_COLUMN[:RESPONSE_COLUMN]."""
    traces: str | None = None
    """Responses recorded before, by `bench replay --save-traces` or `traces export`."""
    limit: int | None = None
    """How many prompts; None is all."""
    responses: Literal["generated", "given"] = "generated"
    """given: each prompt's own `response`, or its last message when that is the assistant's."""
    reference: str | None = None
    """The folder of a draft already distilled, for AdaSPEC, in place of distilling one."""
    finetune_target: str | None = None
    """First train the target on these prompts and their given responses (AdaSPEC, step 1)."""
    finetune_epochs: int = 1
    """Passes of that over the responses."""
    finetune_learning_rate: float = 2e-5
    """Of that, at its start; it falls to nothing."""
    out: str = "distilled"
    """Folder of the run; the same command goes on there after a kill."""
    dtype: str = "auto"
    """Of the target while it answers: auto, bfloat16 or float32."""
    threads: int | None = None
    """None is all cores, shared among the processes of a run."""
    concurrency: int = 16
    """Responses generated together."""

    def __post_init__(self) -> None:
        _require(
            (self.prompts is None) != (self.traces is None),
            "give either prompts (a file of prompts) or traces (recorded responses).",
        )
        _require(self.draft_layers >= 1, f"draft_layers must be at least 1, got {self.draft_layers}.")
        _require(
            self.max_vocabulary_size >= 1, f"max_vocabulary_size must be at least 1, got {self.max_vocabulary_size}."
        )
        _require(self.limit is None or self.limit >= 2, f"limit must be at least 2, got {self.limit}.")
        _require(
            self.responses in ("generated", "given"), f"responses must be generated or given, got {self.responses!r}."
        )
        _require(self.concurrency >= 1, f"concurrency must be at least 1, got {self.concurrency}.")
        _require(self.finetune_epochs >= 1, f"finetune_epochs must be at least 1, got {self.finetune_epochs}.")
        rate = self.finetune_learning_rate
        _require(0.0 < rate < 1.0, f"finetune_learning_rate must lie in (0, 1), got {rate}.")
        _require(
            self.traces is None or self.responses == "generated",
            "responses is given, but traces hold their own; leave it out.",
        )


OSD_SETTINGS: dict[str, object] = {
    "loss": "forward_kl", "positions": "rejected", "traces_per_chunk": 8, "replay_per_new": 0, "max_passes": 1,
    "averaging": 0.0, "decay_from_step": 0, "learning_rate": 3e-3, "warmup_steps": 0,
}  # fmt: skip
"""LearningConfig as Online Speculative Decoding has it (Algorithm 2): rejected positions only, one update every 8 requests, the
buffer emptied. The gate stays, and something has to be drafted for something to be rejected: fix num_speculative_tokens."""


@dataclass(frozen=True, kw_only=True)
class ServedModelConfig:
    name: str = "smollm2-135m"
    """A pulled name, a Hugging Face folder or a .gguf file."""
    draft: str = "auto"
    """auto, none, untrained, a version id, or a draft's or small model's folder."""
    state: str | None = None
    """Folder of drafts and traces; None is this system's usual place."""
    learn: bool = True
    """Keep traces of what is served, here, and train the draft on them."""
    dtype: str = "auto"
    """auto, bfloat16 or float32; auto is the fastest this machine has."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """On CPUs with the compiled step. int8: the target's weights with one scale an output, what enters a product in 8 bits too;
    faster, and another model: answers differ. int4: a GGUF file's own blocks of four bits, kept packed; its weights exactly,
    where bf16 rounds them."""
    device: str = "auto"
    """auto, cpu or cuda; auto takes a GPU where torch sees one."""
    num_threads: int | None = None
    """Of the engine; None is all cores."""

    def __post_init__(self) -> None:
        _require(
            self.num_threads is None or self.num_threads >= 1,
            f"num_threads must be at least 1, got {self.num_threads}.",
        )


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """`livedraft vllm serve`: vLLM serves and livedraft learns beside it."""

    python: str | None = None
    """The interpreter of the environment that vLLM is installed in; None only with `attach`."""
    num_replicas: int = 1
    """vLLM servers to start here."""
    attach: tuple[str, ...] = ()
    """URLs of servers started elsewhere, with livedraft's worker extension; none is started here then."""
    replica_key: str | None = None
    """What attached servers show to send traces and fetch drafts; None makes one for this run."""
    advertised_url: str | None = None
    """Where attached servers reach this one; None is its own address."""
    num_speculative_tokens: int = 3
    """Drafted in every round: vLLM does not choose by itself."""
    tap: bool = True
    """Record what the target verifies; without it nothing is learnt."""
    tap_share: float = 1.0
    """Of the requests: more servers than the learner keeps up with record a part each (docs/scale.md)."""
    arguments: tuple[str, ...] = ()
    """For vLLM's own command line, after livedraft's."""

    def __post_init__(self) -> None:
        _require(self.num_replicas >= 1, f"num_replicas must be at least 1, got {self.num_replicas}.")
        _require(
            1 <= self.num_speculative_tokens <= 32,
            f"num_speculative_tokens must lie in 1..32, got {self.num_speculative_tokens}; for none give --draft none.",
        )
        _require(
            self.python is not None or bool(self.attach),
            "python must name the interpreter vLLM is installed for (--python), or attach a running server.",
        )
        _require(
            all(url.startswith(("http://", "https://")) for url in self.attach),
            f"attach takes URLs such as http://127.0.0.1:8001, got {', '.join(self.attach)}.",
        )
        _require(0.0 < self.tap_share <= 1.0, f"tap_share must lie in (0, 1], got {self.tap_share}; for none set tap.")
        _require(self.replica_key != "", "replica_key must not be empty; leave it out for one of this run.")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens it to the network."""
    port: int = 8000
    """0 takes a free one; the banner says which."""
    served_model_name: str | None = None
    """The name clients use; None is the model as it was given."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens /v1; none leaves it open."""
    admin_key: str | None = None
    """Opens /admin; without one it is closed."""
    max_queue: int = 256
    """Completions that may wait for a slot; more are answered 429."""
    max_request_bytes: int = 4_000_000
    """A larger body is answered 413."""
    request_timeout_seconds: float = 600.0
    """A completion that takes longer, waiting included, is ended."""
    drain_timeout_seconds: float = 30.0
    """After SIGTERM running completions have this long."""
    status_seconds: float = 10.0
    """While requests run, a line on standard error this often; 0 is never."""
    per_request_metrics: bool = False
    """Adds `metrics.speculative_decoding` to responses, as vLLM does."""

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"port must lie in 0..65535, got {self.port}.")
        _require(all(self.api_keys), "api_keys must not hold an empty key; leave it out.")
        _require(self.admin_key != "", "admin_key must not be empty; leave it out to keep /admin closed.")
        _require(
            self.admin_key is None or self.admin_key not in self.api_keys,
            "admin_key must not be one of api_keys: whoever may ask must not be able to promote drafts.",
        )
        _require(self.max_queue >= 0, f"max_queue must not be negative, got {self.max_queue}.")
        _require(self.status_seconds >= 0, f"status_seconds must not be negative, got {self.status_seconds}.")
        for name in ("max_request_bytes", "request_timeout_seconds", "drain_timeout_seconds"):
            _require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}.")
