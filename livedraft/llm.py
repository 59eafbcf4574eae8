"""LLM: the Python front door, and the one place that wires the rooms together.

from livedraft import LLM, SamplingParams
with LLM("smollm2-135m") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].text)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import torch

from livedraft.config import EngineConfig, LearningConfig, RoutingConfig, SpeculationConfig
from livedraft.device import (
    ExecutionPath,
    choose_execution_path,
    device_errors,
    num_available_cores,
    use_threads,
)
from livedraft.draft_source import DraftSource, is_whole_model, tokenizer_of, untrained_draft
from livedraft.drafts.registry import Registry, lock_state
from livedraft.drafts.weights import DraftWeights
from livedraft.engine.engine import Engine
from livedraft.engine.loop import EngineLoop
from livedraft.engine.request import RequestState
from livedraft.engine.slots import within_memory, within_model
from livedraft.engine.swap import SwapWatcher
from livedraft.events import Events
from livedraft.learning.capture import Capture, conversation_key, load_secret
from livedraft.learning.process import TrainerProcess, worker_command
from livedraft.learning.redaction import load_redactor, redacted
from livedraft.learning.store import Streams, TraceStore, clear_memory, keep_in_memory
from livedraft.models.native import quantized, with_kernels
from livedraft.models.open import open_model
from livedraft.models.pull import resolve_model
from livedraft.models.step import ModelStep
from livedraft.records import (
    DEFAULT_ROUTE,
    DraftVersion,
    Request,
    RouteHints,
    SamplingParams,
    Trace,
    UserError,
    text_token_ids,
)
from livedraft.speculation.draft_model import DraftModel
from livedraft.speculation.stats import SpeculationStats
from livedraft.speculation.suffix import Traffic
from livedraft.tokenizer import Message, TextStream
from livedraft.upkeep import Upkeep

if TYPE_CHECKING:
    from livedraft.drafts.router import Router

Prompt = str | Sequence[Message] | Sequence[int]
"""Plain text, chat messages (the model's template is applied), or token ids."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stats: SpeculationStats


class LLM:
    """A target, its draft and, with `learn`, the training process.

    model: a pulled name, a Hugging Face folder or a GGUF file. draft: "auto" (the version in service in `state`, else an
    untrained one), "none" (plain decoding), "untrained", a version id, a folder with draft.safetensors, or a whole small model
    with the target's tokenizer. quantization: "none", "int8" or "int4", as in ModelSettings. graphs: padded steps of fixed
    shapes, replayed as CUDA graphs; None has them on CUDA, True also without a GPU, slower. state: the folder of drafts and
    traces; without one nothing is kept. learn: train on what is served (needs `state`). Raises UserError or ValueError with
    one sentence when something does not fit.

    Drafts made of the target's own layers need a target the native decoder reads; others decode plainly or with a whole small
    model, which can learn too.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str = "auto",
        state: str | Path | None = None,
        learn: bool = False,
        dtype: str = "auto",
        quantization: str = "none",
        device: str = "auto",
        graphs: bool | None = None,
        num_threads: int | None = None,
        engine: EngineConfig | None = None,
        speculation: SpeculationConfig | None = None,
        learning: LearningConfig | None = None,
        routing: RoutingConfig | None = None,
        events: Events | None = None,
    ) -> None:
        if learn and state is None:
            raise ValueError("learn needs a state folder for traces and drafts; give state=.")
        self.events = events or Events()
        self.learning = learning or LearningConfig()
        self.routing = routing or RoutingConfig()
        self._speculation = speculation or SpeculationConfig()
        if draft == "none" and self._speculation.uses_draft:
            self._speculation = replace(self._speculation, method="none")
        if self.learning.redact is not None:  # a text is not kept before the redactor has seen it
            self._speculation = replace(self._speculation, suffix_traffic_tokens=0)
        self._learns = learn and self._speculation.uses_draft
        if learn and not self._learns:
            raise ValueError("learn needs a draft to train; leave out draft='none' and method='none' or 'suffix'.")
        self._request_numbers = itertools.count()
        self._loop: EngineLoop | None = None
        self._state_lock: TextIO | None = None
        self.capture: Capture | None = None
        self.swap: SwapWatcher | None = None
        self.router: Router | None = None
        self.upkeep: Upkeep | None = None
        self.trainer: TrainerProcess | None = None
        use_threads(num_threads or num_available_cores())
        path = choose_execution_path(dtype, device)
        if graphs is None:
            path = with_kernels(path, dtype)
        else:
            path = replace(path, is_graphed=graphs, is_prepacked=False)
        self._draft_path = quantized(path, self._speculation.draft_quantization)
        try:
            with device_errors(path.device):
                self._open(
                    model,
                    quantized(path, quantization),
                    draft,
                    None if state is None else Path(state),
                    engine or EngineConfig(),
                )
        except BaseException:
            self.close()  # a failed start must not keep the state folder's lock, nor a thread
            raise

    def _open(self, model: str, path: ExecutionPath, draft: str, state: Path | None, config: EngineConfig) -> None:
        model_path = resolve_model(model)
        opened = open_model(model_path, path)
        self.path = opened.path
        self.target_fingerprint = opened.fingerprint + ("-int8" if self.path.is_int8 else "")
        if (path.is_int8 or path.is_int4) and not self.path.is_compiled:
            raise UserError(
                "quantization is for models the compiled step knows, and this one has another shape or family."
            )
        self.tokenizer = tokenizer_of(model_path, opened)
        config = within_model(config, opened.max_positions)
        # Of the most drafts that may be resident: of the default route and of the others.
        num_drafts = 1 + (self.routing.max_drafts if self._learns and self.routing.enabled else 0)
        num_draft_layers = num_drafts * self._speculation.num_draft_layers if self._speculation.uses_draft else 0
        self._engine_config = within_memory(config, opened, num_draft_layers, self.events)
        self._num_slots = self._engine_config.max_num_seqs + self._engine_config.num_prefix_slots
        self.state = state
        if self.state is not None:
            self._state_lock = lock_state(self.state)
        self.registry = None if self.state is None else Registry(self.state)
        if self.state is not None:
            if self._learns and self.learning.memory_only:
                keep_in_memory(self.state)
            else:
                clear_memory(self.state)  # what a killed process left
            self.upkeep = Upkeep(self.state, config=self.learning, events=self.events)
        self._target = opened.runtime(num_slots=self._num_slots, max_length=self._engine_config.max_model_len)
        self.num_parameters = opened.num_parameters
        self.uses_own_layers = opened.native is not None and not is_whole_model(draft)
        self._slot_bytes = opened.kv_bytes_per_position(num_draft_layers) * self._engine_config.max_model_len
        self.has_no_draft_by_choice = not self._speculation.uses_draft
        self._drafts = DraftSource(
            self._target,
            path=self._draft_path,
            tokenizer=self.tokenizer,
            target_fingerprint=self.target_fingerprint,
            registry=self.registry,
            events=self.events,
            learns=self._learns,
            untrained=None if self.has_no_draft_by_choice else untrained_draft(opened, self._speculation),
        )
        resident = None if self.has_no_draft_by_choice else self._drafts.first(draft)
        # The key of the hashes by which conversations and clients are known.
        self.secret = load_secret(self.state) if self.state is not None else os.urandom(32)
        if self.routing.enabled and self.state is not None and self._speculation.uses_draft:
            from livedraft.drafts.router import Router  # not before it is needed: it imports scikit-learn

            self.router = Router(self.routing, secret=self.secret, folder=self.state)
        if self._learns and self.state is not None:
            self.capture = Capture(TraceStore(self.state), self.events, redact=self._redaction())
        self.engine = Engine(
            self._target,
            resident,
            config=self._engine_config,
            speculation=self._speculation,
            events=self.events,
            eos_token_ids=self.tokenizer.eos_token_ids,
            target_fingerprint=self.target_fingerprint,
            trace_sink=self.capture.offer if self.capture else None,
            prior=self._drafts.prior_of(resident),
            text_stream=lambda stop: TextStream(self.tokenizer, stop),
        )
        self.engine.max_traffic_age_seconds = self.learning.max_trace_age_days * 86400
        remembers = self._speculation.uses_suffixes and self._speculation.suffix_traffic_tokens > 0
        if self._learns and self.upkeep is not None and self.registry is not None and remembers:
            self.engine.expect_texts(self.registry.routes())
            threading.Thread(target=self._remember_texts, name="livedraft-texts", daemon=True).start()
        if self._learns and self.learning.positions == "rejected" and self._speculation.num_speculative_tokens is None:
            self.events.emit("little_to_learn")
        save = self.router.save if self.router else lambda: None
        serving = self.registry.in_service(DEFAULT_ROUTE) if self.registry else None
        if self.registry is not None and serving is not None and serving.id == self.engine.draft_version:
            assert self.upkeep is not None
            self.upkeep.start(forget_prefixes=self.engine.forget_prefixes, report=self.serving_report, save=save)
            self._drafts.reserve_slots()
            self.swap = SwapWatcher(
                self.engine,
                self.registry,
                max_drafts=self.routing.max_drafts if self.routing.enabled else 0,
                build=lambda version: self.resident_draft(version.id),
                events=self.events,
                after_look=self.upkeep.look,
            )
        elif self.upkeep is not None:  # nothing is swapped, but an operator's deletions hold here too
            self.upkeep.start(forget_prefixes=self.engine.forget_prefixes, report=self.serving_report, save=save)
            self.upkeep.look_now_and_then()
        if self._learns and self.state is not None:
            self.trainer = TrainerProcess(
                worker_command(
                    state=self.state,
                    target=model_path,
                    config=self.learning,
                    routing=self.routing,
                    max_positions=self._engine_config.max_model_len,
                ),
                state=self.state,
                num_threads=self.learning.num_threads,
                events=self.events,
            )

    # --- generating -------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None, *, store: bool = True
    ) -> list[RequestOutput]:
        """Serve one prompt or several together; outputs in the prompts' order. `store=False` keeps them from learning.

        Raises ValueError for a prompt that is empty or too long, and RuntimeError once `loop` owns the engine; then none
        of them is served.
        """
        requests = [self.request(prompt, sampling, store=store) for prompt in _as_list(prompts)]
        states = self.add(requests)
        self.run()
        return [self.output(state) for state in states]

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        store: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        id: str | None = None,
        client: str = "",
        hints: RouteHints | None = None,
    ) -> Request:
        """Tokenise a prompt into a request; the chat template is applied to messages here and nowhere else. `client` says who
        asks: only its keyed hash is kept, for limits and deletion. `hints` say more of its stream of traffic than the text.

        Raises UserError for messages or tools the template does not take.
        """
        root: Sequence[object]
        if isinstance(prompt, str):
            token_ids, root = self.tokenizer.encode(prompt), [prompt]
        elif not prompt or isinstance(prompt[0], int):
            token_ids, root = list(prompt), list(prompt)  # type: ignore[arg-type]  # ids, as the first item says
        else:
            token_ids, root = self.tokenizer.encode_chat(prompt, tools), conversation_root(prompt)  # type: ignore[arg-type]  # messages
        return Request(
            id=id or f"{os.getpid()}-{time.time_ns()}-{next(self._request_numbers)}",
            prompt_token_ids=tuple(token_ids),
            sampling=sampling or SamplingParams(),
            route=self._route(prompt, hints or RouteHints()),
            store=store,
            conversation_key=conversation_key(root, self.secret),
            client_key=conversation_key([client], self.secret) if client else "",
        )

    def _route(self, prompt: Prompt, hints: RouteHints) -> str:
        if self.router is None:
            return DEFAULT_ROUTE
        if isinstance(prompt, str):
            return self.router.route_of("", prompt, hints)
        if not prompt or isinstance(prompt[0], int):
            return self.router.route_of("", "", hints)
        system, user = root_texts(prompt)  # type: ignore[arg-type]  # messages
        return self.router.route_of(system, user, hints)

    def loop(self) -> EngineLoop:
        """Hand the engine to a thread of its own, for a server. From then on `generate`, `add` and `run` are refused."""
        if self._loop is None:
            on_busy = self.trainer.set_busy if self.trainer else lambda is_busy: None
            self._loop = EngineLoop(self.engine, num_threads=torch.get_num_threads(), on_busy=on_busy)
        return self._loop

    @property
    def has_loop(self) -> bool:
        """Whether `loop` owns the engine."""
        return self._loop is not None

    def add(self, requests: Iterable[Request]) -> list[RequestState]:
        """Queue requests, all or none."""
        if self._loop is not None:
            raise RuntimeError("The engine belongs to its loop now; send requests through loop().submit.")
        requests = list(requests)
        for request in requests:
            self.engine.check(request)
        states = [self.engine.add_request(request) for request in requests]
        if states and self.trainer is not None:
            self.trainer.set_busy(True)
        return states

    def run(self, after_round: Callable[[], None] = lambda: None) -> None:
        """Serve until nothing is left."""
        try:
            while self.engine.has_work:
                self.engine.round()
                after_round()
        finally:
            if self.trainer is not None:
                self.trainer.set_busy(False)

    def output(self, state: RequestState) -> RequestOutput:
        assert state.finish_reason is not None
        if state.error is not None:
            raise RuntimeError(state.error)
        stream = TextStream(self.tokenizer, state.request.sampling.stop)
        visible = text_token_ids(state.output_token_ids, state.finish_reason, state.stop_reason)
        return RequestOutput(
            text=stream.push(visible) + stream.finish(),
            token_ids=state.output_token_ids,
            finish_reason=state.finish_reason,
            num_prompt_tokens=state.num_prompt_tokens,
            stats=state.stats,
        )

    @property
    def serve_flops(self) -> float:
        """Of all passes of the target so far: two operations a weight and row. Attention and the draft are left out."""
        return 2.0 * self.num_parameters * self.engine.runner.num_target_rows

    @property
    def kv_gib(self) -> float:
        """KV memory when every slot is full."""
        return self._num_slots * self._slot_bytes / 2**30

    def serving_report(self) -> dict[str, Any]:
        """What serving has used, for the share that training takes."""
        busy, idle = self._loop.busy_and_idle_seconds() if self._loop else (None, None)
        return {
            "draft_version": self.engine.draft_version,
            "serve_flops": self.serve_flops,
            "busy_seconds": busy,
            "idle_seconds": idle,
            "peak_flops_per_second": self.peak_flops_per_second,
        }

    @property
    def peak_flops_per_second(self) -> float:
        """The best rate of the passes timed at start."""
        costs = self.engine.costs.target_seconds_by_rows
        return 2.0 * self.num_parameters * max(rows / seconds for rows, seconds in costs.items())

    # --- drafts -----------------------------------------------------------------------------------------------------

    def resident_draft(self, version_id: str) -> DraftModel:
        """A version, "untrained", or a whole small model, loaded and laid out for serving, with its own empty cache."""
        return self._drafts.resident(version_id)

    def draft_weights(self, version_id: str) -> DraftWeights:
        """A version, "untrained", a draft's folder or a whole small model, as it is trained: in float32."""
        return self._drafts.weights(version_id)

    def laid_out(self, weights: DraftWeights, version: str) -> DraftModel:
        """Draft weights made ready to run beside this target, with a cache of their own."""
        return self._drafts.laid_out(weights, version)

    @property
    def target(self) -> ModelStep:
        """The target's model step, whose slots are the engine's: not for use while requests run."""
        return self._target

    def prior_of(self, draft: DraftModel | None) -> float:
        """The acceptance to expect of a resident draft."""
        return self._drafts.prior_of(draft)

    def untrained_draft(self) -> tuple[DraftWeights, DraftVersion]:
        """The draft every stream starts from, with its description as a first version. Raises UserError without one."""
        return self._drafts.untrained()

    def _remember_texts(self) -> None:
        """What earlier processes served here, read while this one serves already."""
        try:
            for route, texts in self.earlier_texts():
                self.engine.offer_texts(route, texts)
        except (UserError, sqlite3.Error) as error:
            self.events.emit("texts_not_read", reason=str(error))

    def earlier_texts(self) -> Iterator[tuple[str, Traffic]]:
        """By route, what the state folder's newest traces said: what suffixes are found in after a restart."""
        if self.upkeep is None or self.registry is None:
            return
        most = self._speculation.suffix_traffic_tokens
        for route, streams in _streams_by_route(self.registry.routes(), self.registry.assignments()).items():
            texts = self.upkeep.read_texts(streams, self.engine.new_traffic(), most)
            if texts is not None:
                yield route, texts

    def _redaction(self) -> Callable[[Trace], Trace | None]:
        if self.learning.redact is None:
            return lambda trace: trace
        redactor = load_redactor(self.learning.redact)
        return lambda trace: redacted(trace, redactor, self.tokenizer.decode)

    # --- ending -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write queued traces, end the training process, release the state folder. Safe to call twice. What is left answers
        `generate` still, with the draft it has; nothing is stored any more."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if self.swap is not None:
            self.swap.close()
            self.engine.drafting.withdraw_offer()
        if self.capture is not None:
            self.capture.close()
        if self.upkeep is not None:
            self.upkeep.close()
            self.upkeep.keep_events()
        if self.router is not None:
            with contextlib.suppress(UserError):  # the disk is full: topics are found anew
                self.router.save()
        if self.trainer is not None:
            self.trainer.close()
        if self.capture is not None and self.learning.memory_only and self.state is not None:
            clear_memory(self.state)
        if self._state_lock is not None:
            self._state_lock.close()
        self.swap = self.capture = self.trainer = self._state_lock = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them: a list of messages or of token ids is one prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (dict, int))):
        return [prompts]  # type: ignore[list-item]  # one prompt, as its first item says
    return list(prompts)  # type: ignore[arg-type]  # several


def _streams_by_route(routes: Sequence[str], assignments: Mapping[str, str]) -> dict[str, Streams]:
    """Whose requests each route with a draft serves: a stream that was given to another route's draft is that route's."""
    served: dict[str, list[str]] = {route: [] for route in routes if route != DEFAULT_ROUTE}
    elsewhere = []
    for stream in {*assignments, *served}:
        route = assignments.get(stream, stream)
        if route in served:
            served[route].append(stream)
            elsewhere.append(stream)
    others = {route: Streams(names=tuple(sorted(names)), are_left_out=False) for route, names in served.items()}
    return {DEFAULT_ROUTE: Streams(names=tuple(sorted(elsewhere))), **others}


def conversation_root(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """System message and first user message: every turn of a conversation has the same."""
    root = [(message["role"], str(message["content"])) for message in messages if message["role"] == "system"][:1]
    first_user = next((message for message in messages if message["role"] == "user"), None)
    return root if first_user is None else [*root, ("user", str(first_user["content"]))]


def root_texts(messages: Sequence[Message]) -> tuple[str, str]:
    """(system prompt, first user message)."""
    root = dict(conversation_root(messages))
    return root.get("system", ""), root.get("user", "")
