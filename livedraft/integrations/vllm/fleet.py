"""The vLLM servers of one target: started or attached, kept alive, and each given the draft it is to serve.

A member's life: starting -> ready -> down -> starting. Bringing one up takes tens of seconds and has a thread of its own; the
event loop only reads `choose`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from livedraft.engine.watch import LiveCounts
from livedraft.events import Events
from livedraft.integrations.vllm.drafts import ExportedVersion
from livedraft.integrations.vllm.launch import (
    LaunchConfig,
    VllmProcess,
    available_cores,
    end_leftover,
    free_port,
)
from livedraft.integrations.vllm.replica import (
    Capabilities,
    DeadEngineError,
    RefusedError,
    Replica,
    ReplicaError,
)
from livedraft.records import UserError

START_SECONDS = 600.0
"""For vLLM to load its models."""
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
_POLL_SECONDS = 0.25
_SICK_LOOKS = 3
"""Health checks in a row that an attached server may miss."""
NO_COUNTS = LiveCounts(num_requests=0, num_rounds=0, num_accepted=0, num_drafted_tokens=0)
Phase = Literal["starting", "ready", "down", "refused"]


@dataclass(kw_only=True, eq=False)
class Member:
    """One vLLM server. `num_running` is the event loop's, everything else the fleet's."""

    name: str
    replica: Replica
    process: VllmProcess | None = None
    phase: Phase = "starting"
    version: str = "none"
    """The draft it has resident."""
    can_swap: bool = False
    capabilities: Capabilities | None = None
    num_running: int = 0
    num_starts: int = 0
    num_swaps: int = 0
    num_sick_looks: int = 0
    reason: str = ""
    """Why it is down."""
    counts_at_swap: LiveCounts = field(default_factory=lambda: NO_COUNTS)
    last_swap: dict[str, object] = field(default_factory=dict)

    @property
    def life(self) -> tuple[int, int]:
        """Another one after each start and swap: counts of two lives are not to be compared."""
        return self.num_starts, self.num_swaps

    def counts(self) -> LiveCounts:
        """Of the draft it has now, since it has it. Raises ReplicaError."""
        return self.replica.counts().since(self.counts_at_swap)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How a worker reaches the parent, and the parent's wishes."""

    url: str
    token: str
    target_fingerprint: str
    tap: bool = True
    tap_share: float = 1.0


class Fleet:
    def __init__(
        self,
        *,
        num_launched: int,
        attached: tuple[str, ...],
        launch: LaunchConfig | None,
        method: str,
        wiring: Wiring,
        wanted: Callable[[], ExportedVersion],
        folder: Path,
        events: Events,
    ) -> None:
        """`wanted` is the version every member has to serve when it comes up. Launched members speculate by `method`."""
        assert launch is not None or not num_launched
        self._launch, self._method, self._wiring, self._wanted = launch, method, wiring, wanted
        self._folder, self._events = folder, events
        self._num_launched = num_launched
        self._closing = threading.Event()
        self.members = [Member(name=f"replica {n}", replica=Replica("")) for n in range(num_launched)]
        self.members += [Member(name=url, replica=Replica(url)) for url in attached]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """All of them side by side. Raises UserError with the first one's reason when none comes up or one is refused."""
        for index, member in enumerate(self.members):
            thread = threading.Thread(target=self._keep_up, args=(index, member), name=f"livedraft-{member.name}")
            thread.daemon = True
            thread.start()
            self._threads.append(thread)
        while not self.ready():
            refused = next((member for member in self.members if member.phase == "refused"), None)
            if refused is not None:
                raise UserError(refused.reason)
            if all(member.num_starts >= 2 and member.phase == "down" for member in self.members):
                raise UserError(f"vLLM does not start: {self.members[0].reason}")
            if self._closing.wait(_POLL_SECONDS):
                raise UserError("The server was ended while vLLM was starting.")

    def ready(self) -> list[Member]:
        return [member for member in self.members if member.phase == "ready"]

    def choose(self, without: set[str]) -> Member | None:
        """The least busy one that is up, on the event loop."""
        usable = [member for member in self.members if member.phase == "ready" and member.name not in without]
        return min(usable, key=lambda member: member.num_running, default=None)

    def stop_starting(self) -> None:
        self._closing.set()

    def close(self) -> None:
        """Launched servers end; attached ones go on, untapped."""
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=30.0)
        for member in self.members:
            if member.process is None and member.phase == "ready":
                with contextlib.suppress(ReplicaError):
                    member.replica.set_tap(False)
            if member.process is not None:
                member.process.end()
            member.replica.close()

    # --- one member's life ------------------------------------------------------------------------------------------

    def _keep_up(self, index: int, member: Member) -> None:
        is_launched = not member.replica.url
        backoff = FIRST_BACKOFF_SECONDS
        while not self._closing.is_set():
            member.num_starts += 1
            try:
                self._bring_up(index, member, is_launched)
                self._events.emit("replica_up", replica=member.name, version=member.version)
                backoff = FIRST_BACKOFF_SECONDS
                self._watch(member)
            except UserError as error:  # what no second try will mend
                member.phase, member.reason = "refused", str(error)
                self._events.emit("replica_refused", replica=member.name, reason=str(error))
            except Exception as error:  # a thread that dies silently would never bring it back
                member.reason = str(error) if isinstance(error, ReplicaError) else f"{type(error).__name__}: {error}"
            if member.phase != "refused":
                member.phase = "down"
            if is_launched and member.process is not None:
                member.process.end(at_once=not self._closing.is_set())
            if self._closing.is_set() or member.phase == "refused":
                return
            self._events.emit("replica_down", replica=member.name, reason=member.reason, restart_in_seconds=backoff)
            self._closing.wait(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)
            member.phase = "starting"

    def _bring_up(self, index: int, member: Member, is_launched: bool) -> None:
        """Raises ReplicaError or UserError."""
        wanted = self._wanted()
        if is_launched:
            assert self._launch is not None
            marker = self._folder / f"replica-{index}.pid"
            end_leftover(marker)
            port = free_port()
            draft = wanted.folder if self._method == "draft_model" else None
            cores = available_cores()
            member.process = VllmProcess(
                self._launch, port=port, draft=draft, method=self._method, log=self._folder / f"replica-{index}.log",
                core=cores[index % len(cores)] if self._num_launched > 1 else None,
            )  # fmt: skip
            marker.write_text(str(member.process.pid), encoding="utf-8")
            member.replica.close()
            member.replica = Replica(f"http://127.0.0.1:{port}")
        self._wait_healthy(member)
        member.capabilities = member.replica.probe()
        resident = wanted.version if is_launched and self._method == "draft_model" else "none"
        wiring = self._wiring
        reason = member.replica.start_tap(
            version=resident, target=wiring.target_fingerprint, url=f"{wiring.url}/replica/traces", token=wiring.token,
            is_on=wiring.tap, share=wiring.tap_share,
        )  # fmt: skip
        member.can_swap = not reason
        if reason and member.capabilities.has_draft:
            raise UserError(f"The draft of the vLLM server at {member.name} cannot be swapped: {reason}")
        member.version, member.counts_at_swap = resident, member.replica.counts()
        member.num_sick_looks = 0
        if member.can_swap and resident != wanted.version:
            try:
                self._swap(member, wanted)
            except RefusedError as error:
                raise UserError(
                    f"The draft of the vLLM server at {member.name} is not of this learner's shape: {error} Start it "
                    f"with the folder that `livedraft drafts export {wanted.version} FOLDER` writes."
                ) from error
            except DeadEngineError as error:
                raise ReplicaError(str(error)) from error
        member.phase = "ready"

    def _wait_healthy(self, member: Member) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not member.replica.is_healthy():
            if member.process is not None and member.process.exit_code is not None:
                raise ReplicaError(f"vLLM ended with code {member.process.exit_code}: {member.process.last_words()}")
            if time.monotonic() > deadline or self._closing.wait(_POLL_SECONDS):
                raise ReplicaError("It did not come up.")

    def _watch(self, member: Member) -> None:
        """Until it is down."""
        while not self._closing.wait(_POLL_SECONDS):
            if member.phase != "ready":
                return
            if member.process is not None:
                if member.process.exit_code is not None:
                    member.reason = f"It ended with code {member.process.exit_code}: {member.process.last_words()}"
                    return
                continue
            member.num_sick_looks = 0 if member.replica.is_healthy() else member.num_sick_looks + 1
            if member.num_sick_looks >= _SICK_LOOKS:
                member.reason = "It does not answer."
                return

    # --- drafts -----------------------------------------------------------------------------------------------------

    def give(self, member: Member, version: ExportedVersion) -> None:
        """Make it serve this version. Raises RefusedError when its workers will not have it; a member that is lost meanwhile
        is restarted, with what is wanted then."""
        try:
            self._swap(member, version)
        except (DeadEngineError, ReplicaError) as error:
            member.reason = f"The swap to {version.version} failed: {error}"
            self._events.emit("swap_failed", reason=f"{member.name}: {member.reason}")
            member.phase = "down"  # `_watch` sees it; until it is back nobody is sent there

    def _swap(self, member: Member, version: ExportedVersion) -> None:
        is_here = member.process is not None  # it reads our files; others fetch them
        source = str(version.file) if is_here else f"{self._wiring.url}/replica/versions/{version.version}"
        previous = member.version
        member.last_swap = member.replica.swap(version, source=source, token=self._wiring.token)
        member.version, member.counts_at_swap = version.version, member.replica.counts()
        member.num_swaps += 1
        self._events.emit(
            "replica_swapped", replica=member.name, previous=previous, version=version.version,
            paused_seconds=member.last_swap["paused_seconds"],
        )  # fmt: skip
