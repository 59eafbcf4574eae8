"""The learner beside vLLM: a state folder, a training process, a fleet and its rollout. What `llm.py` is for the engine in this
process.

A request's way to a trace: `app` names it to vLLM and remembers what it is -> a worker taps it -> it comes back by HTTP
(`take`) -> `traces` joins the two -> the trace store, as from the engine in this process.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from livedraft.config import RoutingConfig, VllmConfig
from livedraft.drafts.registry import Registry, lock_state
from livedraft.events import Events
from livedraft.integrations.vllm.drafts import (
    ExportedVersion,
    exported,
    first_version,
    read_target,
    remove_old,
    target_folder,
)
from livedraft.integrations.vllm.fleet import Fleet, Wiring
from livedraft.integrations.vllm.launch import LaunchConfig, look_at, write_inside_part
from livedraft.integrations.vllm.replica import ReplicaError
from livedraft.integrations.vllm.rollout import Rollout
from livedraft.integrations.vllm.traces import KnownRequests, to_traces
from livedraft.integrations.vllm.wire import unpack
from livedraft.learning.capture import Capture, load_secret
from livedraft.learning.process import TrainerProcess, worker_command
from livedraft.learning.redaction import load_redactor, redacted
from livedraft.learning.store import TraceStore, clear_memory, keep_in_memory
from livedraft.models.pull import resolve_model
from livedraft.records import DEFAULT_ROUTE, Trace, UserError
from livedraft.server.local import state_folder
from livedraft.settings import Settings
from livedraft.upkeep import Upkeep

_CPU_KV_GB = 1.0
"""Where nothing is said: on a CPU vLLM would take a share of all memory."""
_TAP_LOOK_SECONDS = 30.0
_MAX_SHIPMENTS = 16
"""Waiting to be unpacked; past that replicas are told to wait."""


class VllmService:
    """Everything but the HTTP application. Raises UserError or ValueError with one sentence when something does not fit."""

    def __init__(self, settings: Settings, config: VllmConfig, *, url: str, events: Events | None = None) -> None:
        """`url` is where replicas reach this process; `start` expects it to be listened on."""
        self.settings, self.config = settings, config
        self.events = events or Events()
        self.known = KnownRequests()
        self.replica_key = config.replica_key or secrets.token_urlsafe(24)
        self.state = state_folder(settings)
        given = settings.model.name
        self.name = settings.server.served_model_name or (Path(given).resolve().name if Path(given).exists() else given)
        self.num_unknown = self.num_bad_shipments = 0
        self._url = url
        self._lock: TextIO | None = None
        self._exporting = threading.Lock()
        self._taps_seen_at = 0.0
        self._untapped: set[str] = set()
        self.capture: Capture | None = None
        self.trainer: TrainerProcess | None = None
        self.upkeep: Upkeep | None = None
        self.fleet: Fleet | None = None
        self.rollout: Rollout | None = None
        self._shipments: queue.Queue[bytes | None] = queue.Queue(maxsize=_MAX_SHIPMENTS)
        self._unpacker: threading.Thread | None = None

    def start(self) -> None:
        """Returns once a replica is up. Raises UserError; then `close` tidies up."""
        settings, config = self.settings, self.config
        environment = None if config.attach else look_at(Path(config.python or ""))
        torch.set_num_threads(1)  # drafts are written here now and then, beside engines that want the cores
        self._lock = lock_state(self.state)
        self._prepare_store()
        self.upkeep = Upkeep(self.state, config=settings.learning, events=self.events)
        self.registry = Registry(self.state)
        folder = target_folder(resolve_model(settings.model.name), self.state)
        self.target = read_target(folder, settings.speculation)
        draft = settings.model.draft
        first = first_version(self.registry, self.target, draft, settings.speculation)
        method = "draft_model" if draft not in ("none", "ngram") or first.num_requests_seen else draft
        self.secret = load_secret(self.state)
        if settings.model.learn and config.tap:
            self.capture = Capture(TraceStore(self.state), self.events, redact=self._redaction())
            self._unpacker = threading.Thread(target=self._unpack, name="livedraft-unpack", daemon=True)
            self._unpacker.start()
        launch = None
        if environment is not None:
            kv_gb = settings.engine.kv_cache_gb or (_CPU_KV_GB if environment.is_cpu else None)
            launch = LaunchConfig(
                environment=environment, target=folder, served_name=self.name,
                inside_part=write_inside_part(self.state / "vllm" / "inside"),
                num_speculative_tokens=config.num_speculative_tokens, max_model_len=self.max_model_len,
                kv_cache_bytes=None if kv_gb is None else int(kv_gb * 2**30), arguments=config.arguments,
            )  # fmt: skip
        wiring = Wiring(
            url=config.advertised_url or self._url, token=self.replica_key,
            target_fingerprint=self.target.fingerprint, tap=self.capture is not None, tap_share=config.tap_share,
        )  # fmt: skip
        self.fleet = Fleet(
            num_launched=0 if config.attach else config.num_replicas, attached=config.attach, launch=launch, method=method,
            wiring=wiring, wanted=lambda: self.export(self.serving_id), folder=self.state / "vllm", events=self.events,
        )  # fmt: skip
        self.fleet.start()
        self.upkeep.start(forget_prefixes=self._forget_prefixes, report=self.report)
        self.rollout = Rollout(
            self.fleet,
            self.registry,
            route=DEFAULT_ROUTE,
            export=self.export,
            events=self.events,
            after_look=self._after_look,
        )
        self.rollout.start()
        if self.capture is not None:
            command = worker_command(
                state=self.state,
                target=folder,
                config=settings.learning,
                routing=RoutingConfig(enabled=False),
                max_positions=self.max_model_len,
            )
            self.trainer = TrainerProcess(
                command, state=self.state, num_threads=settings.learning.num_threads, events=self.events
            )

    @property
    def max_model_len(self) -> int:
        return min(self.settings.engine.max_model_len, self.target.first_layers.config.max_positions)

    @property
    def serving_id(self) -> str:
        serving = self.rollout.serving if self.rollout is not None else self.registry.in_service(DEFAULT_ROUTE)
        assert serving is not None
        return serving.id

    def _prepare_store(self) -> None:
        learns = self.settings.model.learn and self.config.tap
        if learns and self.settings.learning.memory_only:
            keep_in_memory(self.state)
        else:
            clear_memory(self.state)  # what a killed process left

    def _redaction(self) -> Callable[[Trace], Trace | None]:
        if self.settings.learning.redact is None:
            return lambda trace: trace
        redactor = load_redactor(self.settings.learning.redact)
        return lambda trace: redacted(trace, redactor, self.target.tokenizer.decode)

    # --- what replicas send and fetch -------------------------------------------------------------------------------

    def take(self, shipment: bytes) -> bool:
        """Tapped requests from a replica; False tells it to wait. Never blocks."""
        if self.capture is None:
            return True  # switched off meanwhile; nothing is kept
        try:
            self._shipments.put_nowait(shipment)
        except queue.Full:
            return False
        return True

    def _unpack(self) -> None:
        while (shipment := self._shipments.get()) is not None:
            try:
                requests = unpack(shipment)
                traces = to_traces(requests, self.known, self.target.fingerprint)
            except Exception as error:  # whatever a replica sends must not end learning
                self.num_bad_shipments += 1
                self.events.emit("shipment_refused", reason=str(error))
                continue
            self.num_unknown += len(requests) - len(traces)
            for trace in traces:
                assert self.capture is not None
                self.capture.offer(trace)

    def export(self, version_id: str) -> ExportedVersion:
        """As vLLM takes it; from any thread. Raises UserError."""
        with self._exporting:
            return exported(self.registry, version_id, self.target)

    def weights_file(self, version_id: str) -> Path | None:
        """Of a version that was exported, for replicas elsewhere."""
        if self.rollout is None and self.registry.in_service(DEFAULT_ROUTE) is None:
            return None
        known = {row["id"] for row in self.registry.versions(DEFAULT_ROUTE)}
        if version_id not in known:
            return None
        try:
            return self.export(version_id).file
        except UserError:
            return None

    # --- beside serving ---------------------------------------------------------------------------------------------

    def set_busy(self, is_busy: bool) -> None:
        """Requests run or wait: training steps aside."""
        if self.trainer is not None:
            self.trainer.set_busy(is_busy)

    def _after_look(self) -> None:
        assert self.upkeep is not None and self.fleet is not None
        self.upkeep.look()
        self._look_at_taps()
        trial = self.rollout.trial if self.rollout else None
        in_use = {member.version for member in self.fleet.members} | {self.serving_id}
        remove_old(self.registry, in_use | ({trial.old.id, trial.new.id} if trial else set()))

    def _look_at_taps(self) -> None:
        """A tap that has failed is off; nobody would notice but by what is not learnt."""
        assert self.fleet is not None
        if self.capture is None or time.monotonic() - self._taps_seen_at < _TAP_LOOK_SECONDS:
            return
        self._taps_seen_at = time.monotonic()
        for member in self.fleet.ready():
            with contextlib.suppress(ReplicaError):
                report = member.replica.report()
                if not report["tap"] and member.name not in self._untapped:
                    self._untapped.add(member.name)
                    self.events.emit("tap_failed", replica=member.name, reason=report["last_problem"])

    def _forget_prefixes(self) -> None:
        assert self.fleet is not None
        for member in self.fleet.ready():
            with contextlib.suppress(ReplicaError):
                member.replica.forget_prefixes()

    def report(self) -> dict[str, Any]:
        """For status: what serves where. What vLLM computes is not counted."""
        return self.rollout.report() if self.rollout is not None else {"draft_version": "none"}

    def close(self) -> None:
        """Replicas end or are left untapped, queued traces are written, training ends. Safe to call twice."""
        if self.rollout is not None:
            self.rollout.close()
        if self.fleet is not None:
            self.fleet.close()
        if self._unpacker is not None:
            self._shipments.put(None)
            self._unpacker.join(5.0)
        if self.capture is not None:
            self.capture.close()
        if self.upkeep is not None:
            self.upkeep.close()
            self.upkeep.keep_events()
        if self.trainer is not None:
            self.trainer.close()
        if self.capture is not None and self.settings.learning.memory_only:
            clear_memory(self.state)
        if self._lock is not None:
            self._lock.close()
        self.rollout = self.fleet = self.capture = self.upkeep = self.trainer = self._lock = self._unpacker = None
