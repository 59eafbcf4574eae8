"""Takes versions into service over a fleet: what `engine/swap.py` is for one engine, in steps of whole replicas.

A version that passed the gate is a canary:
  1. with several replicas one gets it, and is compared with the others over the same time;
  2. fine, and the others follow; worse, and that one goes back to the version before;
  3. from then on, and with one replica from the start, the version is watched against what the one before had come to, and
     rolled back when it is worse.
An operator's choice is given to all at once and watched like step 3. The judge is the engine's own (`engine/watch.py`).

A thread that looks at the registry and at the replicas' public counters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from livedraft.drafts.registry import Registry
from livedraft.engine.watch import CANARY_ROUNDS, LiveCounts, Stage, judge
from livedraft.events import Events
from livedraft.integrations.vllm.drafts import ExportedVersion
from livedraft.integrations.vllm.fleet import NO_COUNTS, Fleet, Member
from livedraft.integrations.vllm.replica import RefusedError
from livedraft.records import DraftVersion, UserError

POLL_SECONDS = 0.5
MOST_TOGETHER = 8
"""Replicas swapped at the same time: a quarter of all, so that the others serve meanwhile, and no more than these."""


@dataclass(kw_only=True)
class Trial:
    stage: Stage
    new: DraftVersion
    old: DraftVersion
    decision: dict[str, Any]
    canary: Member | None
    old_counts: LiveCounts
    """With no other replica to compare with: what the version before had come to."""
    started: dict[str, tuple[tuple[int, int], LiveCounts]] = field(default_factory=dict)
    """By member: its life, and what it had counted, when the trial began; of those that go on with the version before."""
    started_at: float = field(default_factory=time.monotonic)


class Rollout:
    def __init__(
        self,
        fleet: Fleet,
        registry: Registry,
        *,
        route: str,
        export: Callable[[str], ExportedVersion],
        events: Events,
        after_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`export` writes a version as vLLM takes it, or raises UserError; `after_look` runs after every look. What the fleet
        has been given must be what the registry has in service."""
        self._fleet, self._registry, self._route, self._export, self._events = fleet, registry, route, export, events
        self._after_look = after_look
        serving = registry.in_service(route)
        assert serving is not None
        self.serving = serving
        self.trial: Trial | None = None
        self._refused: set[str] = set()
        self._last_problem = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="livedraft-rollout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            for part in (self.look, self._after_look):
                try:
                    part()
                except Exception as error:  # a thread that dies silently would end all swaps
                    problem = f"{type(error).__name__}: {error}"
                    if problem != self._last_problem:
                        self._events.emit("swap_failed", reason=problem)
                    self._last_problem = problem

    def look(self) -> None:
        """Follow the registry, then judge what is on trial. Raises UserError as the registry, ReplicaError as a replica."""
        serving, canary = self._registry.in_service(self._route), self._registry.canary(self._route)
        if serving is not None and serving.id != self.serving.id and serving.id not in self._refused:
            self._take_over(serving)
            return
        trial = self.trial
        if trial is not None and trial.stage == "canary" and (canary is None or canary.id != trial.new.id):
            self.trial = trial = None  # withdrawn by an operator
        self._bring_in_line()
        if trial is None and canary is not None:
            self._start_canary(canary)
        elif trial is not None:
            self._judge(trial, is_next_waiting=canary is not None and canary.id != trial.new.id)

    # --- changes ----------------------------------------------------------------------------------------------------

    def wanted_of(self, member: Member) -> DraftVersion:
        """What a member is to serve just now."""
        trial = self.trial
        is_canary = trial is not None and trial.stage == "canary" and trial.canary is member
        return trial.new if trial is not None and is_canary else self.serving

    def _bring_in_line(self) -> None:
        """Members that were away, or whose swap did not come about."""
        behind: dict[str, list[Member]] = {}
        wanted = {}
        for member in self._swappable():
            version = self.wanted_of(member)
            if member.version != version.id:
                wanted[version.id] = version
                behind.setdefault(version.id, []).append(member)
        for version_id, members in behind.items():
            self._give(members, wanted[version_id])

    def _swappable(self) -> list[Member]:
        return [member for member in self._fleet.ready() if member.can_swap]

    def _give(self, members: Sequence[Member], version: DraftVersion) -> None:
        """Raises UserError when a version cannot be had or will not be taken."""
        exported = self._export(version.id)
        together = max(1, min(MOST_TOGETHER, len(members) // 4))
        with ThreadPoolExecutor(max_workers=together, thread_name_prefix="livedraft-swap") as pool:
            given = [(member, pool.submit(self._fleet.give, member, exported)) for member in members]
        for member, done in given:
            error = done.exception()
            if isinstance(error, RefusedError):
                raise UserError(f"Draft {version.id} was refused by {member.name}: {error}") from error
            if error is not None:
                raise error

    def _take_over(self, version: DraftVersion) -> None:
        """By an operator's word or another process."""
        old, old_counts = self.serving, self._total(self._swappable())
        before = self._registry.version(old.id)["status"]
        try:
            self._give(self._swappable(), version)
        except UserError as error:
            self._refuse(version, error)
            self._registry.serve(old.id, self._route, {})
            return
        self.serving = version
        self.trial = None
        if before != "rolled_back":
            self._watch(version, old, old_counts)

    def _start_canary(self, version: DraftVersion) -> None:
        members = self._swappable()
        if not members:
            self._serve_later(version)
            return
        old_counts = self._total(members)
        started = {member.name: (member.life, member.counts()) for member in members[1:]}
        try:
            self._give(members[:1], version)
        except UserError as error:
            self._refuse(version, error)
            return
        if members[0].version != version.id:
            return  # it was lost; the next look tries again
        decision = self._registry.version(version.id)["decision"] or {}
        if len(members) == 1:
            old, self.serving = self.serving, self._registry.serve(version.id, self._route, {}, only_from=("canary",))
            self._watch(self.serving, old, old_counts)
            return
        self.trial = Trial(
            stage="canary", new=version, old=self.serving, decision=decision, canary=members[0], old_counts=NO_COUNTS,
            started=started,
        )  # fmt: skip
        share = round(1 / len(members), 3)
        self._events.emit("trial_started", version=version.id, against=self.serving.id, stage="canary", share=share)

    def _serve_later(self, version: DraftVersion) -> None:
        """vLLM was started without a draft, and none can be put into it as it runs."""
        if not self._fleet.ready() or any(member.can_swap for member in self._fleet.members):
            return  # down just now
        self.serving = self._registry.serve(
            version.id, self._route, {"canary": "not needed", "watched": True}, only_from=("canary",)
        )
        self._events.emit("draft_waits_for_restart", version=version.id)

    def _refuse(self, version: DraftVersion, error: UserError) -> None:
        self._refused.add(version.id)
        self._events.emit("draft_refused", version=version.id, reason=str(error))
        self._registry.set_aside(version.id, str(error))

    def _watch(self, new: DraftVersion, old: DraftVersion, old_counts: LiveCounts) -> None:
        decision = self._registry.version(new.id)["decision"] or {}
        self.trial = Trial(stage="watched", new=new, old=old, decision=decision, canary=None, old_counts=old_counts)
        self._events.emit("trial_started", version=new.id, against=old.id, stage="watched", share=1.0)

    # --- the watch --------------------------------------------------------------------------------------------------

    @staticmethod
    def _total(members: Sequence[Member]) -> LiveCounts:
        """Of the drafts they have now."""
        counts = [asdict(member.counts()) for member in members]
        return LiveCounts(**{name: sum(one[name] for one in counts) for name in asdict(NO_COUNTS)})

    @staticmethod
    def _others_since(trial: Trial, members: Sequence[Member]) -> LiveCounts:
        """Of those that served the version before all the while; one that has restarted counts from there."""
        others = []
        for member in members:
            life, counts = trial.started.get(member.name, (None, NO_COUNTS))
            if member.version == trial.old.id and life is not None:
                others.append(asdict(member.counts().since(counts if member.life == life else NO_COUNTS)))
        return LiveCounts(**{name: sum(one[name] for one in others) for name in asdict(NO_COUNTS)})

    def _judge(self, trial: Trial, *, is_next_waiting: bool) -> None:
        members = self._swappable()
        news = [member for member in members if member.version == trial.new.id]
        if trial.stage == "canary":
            old = self._others_since(trial, members)
        else:
            old = trial.old_counts
        new = self._total(news)
        judgement = judge(trial.stage, new, old, expected=trial.decision.get("parent_alpha"))
        seconds = round(time.monotonic() - trial.started_at, 1)
        numbers = {**judgement.numbers, "watch": judgement.reason, "seconds": seconds}
        if judgement.finding == "worse":
            self._roll_back(trial, numbers)
        elif trial.stage == "canary" and judgement.finding == "fine":
            self._confirm(trial, numbers, old)
        elif judgement.finding == "fine" or (is_next_waiting and new.num_rounds >= CANARY_ROUNDS):
            self._registry.note(trial.new.id, {**numbers, "watched": True})
            self._events.emit("watch_ended", version=trial.new.id, previous=trial.old.id, **numbers)
            self.trial = None

    def _confirm(self, trial: Trial, numbers: dict[str, Any], old: LiveCounts) -> None:
        self.serving = self._registry.serve(trial.new.id, self._route, numbers, only_from=("canary",))
        self._events.emit("canary_confirmed", version=trial.new.id, previous=trial.old.id, **numbers)
        self._watch(trial.new, trial.old, old)
        self._bring_in_line()

    def _roll_back(self, trial: Trial, numbers: dict[str, Any]) -> None:
        self._registry.undo_trial(trial.new.id, trial.old.id, self._route, numbers, is_canary=trial.stage == "canary")
        self.serving, self.trial = trial.old, None
        self._events.emit("draft_rolled_back", version=trial.new.id, previous=trial.old.id, **numbers)
        self._bring_in_line()

    def report(self) -> dict[str, Any]:
        """For status and metrics."""
        trial = self.trial
        return {
            "draft_version": self.serving.id,
            "trial": None if trial is None else {"version": trial.new.id, "stage": trial.stage},
            "replicas": [
                {"name": one.name, "phase": one.phase, "version": one.version, "num_running": one.num_running}
                for one in self._fleet.members
            ],
        }
