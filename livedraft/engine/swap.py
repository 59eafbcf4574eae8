"""Takes versions into service and watches them: a thread that looks at the registry and at the engine's counters.

A version that passed the gate comes as a canary:
  1. its draft is filled and checked here, off the engine's loop, and offered for CANARY_SHARE of the requests;
  2. once it has drafted enough, the watch judges: worse, and it is rolled back; else it takes over, and the version before
     stays on CANARY_SHARE of the requests;
  3. it is judged again and again until it has served WATCHED_REQUESTS, or the next one has passed the gate: worse, and the
     version before is back.
Where the draft in service is not worth drafting with, there is nothing to protect: the canary takes over at once.

An operator's choice is in service at once and watched like step 3; a roll-back is not questioned.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from livedraft.drafts.registry import Registry
from livedraft.engine.drafting import Lineup
from livedraft.engine.engine import Engine
from livedraft.engine.watch import CANARY_ROUNDS, Judgement, LiveCounts, Stage, judge
from livedraft.events import Events
from livedraft.records import DEFAULT_ROUTE, DraftVersion, UserError
from livedraft.speculation.draft_model import DraftModel

POLL_SECONDS = 0.25
CANARY_SHARE = 0.1
_STICKY_SECONDS = 60.0
_PRIOR_SECONDS = 5.0
"""Between two looks at what the trainer expects of the draft in service."""


@dataclass(kw_only=True)
class Trial:
    """Two versions side by side."""

    stage: Stage
    new: DraftVersion
    new_draft: DraftModel
    old: DraftVersion
    old_draft: DraftModel
    decision: dict[str, Any]
    started: dict[str, LiveCounts]
    """What both had counted when the trial began, by version."""
    started_at: float


class SwapWatcher:
    """The thread, and which routes' drafts are in memory."""

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        *,
        build: Callable[[DraftVersion], DraftModel],
        events: Events,
        max_drafts: int = 1,
        after_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`build` makes a resident draft of a version, or raises UserError; `after_look` runs on this thread after every look
        at the registry. What the engine serves now must be what the registry has in service on the default route.
        `max_drafts`: of routes, resident at a time; the least used ones make room and come back when they are asked for."""
        self._engine, self._registry, self._max_drafts = engine, registry, max_drafts
        self._new_route = partial(RouteSwaps, engine, registry, build=build, events=events)
        self._events, self._after_look = events, after_look
        default = self._new_route(DEFAULT_ROUTE, serving=registry.in_service(DEFAULT_ROUTE), draft=engine.draft)
        self.routes = {DEFAULT_ROUTE: default}
        self._aliases: dict[str, str] = {}
        self._last_problem = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="swap-watcher", daemon=True)
        self._thread.start()

    @property
    def trial(self) -> Trial | None:
        """Of any route."""
        return next((route.trial for route in list(self.routes.values()) if route.trial is not None), None)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        torch.set_num_threads(1)  # this thread's own pool: filling a draft must not fight the engine for cores
        while not self._closing.wait(POLL_SECONDS):
            for part in (self.look, self._after_look):
                try:
                    part()
                except Exception as error:  # a thread that dies silently would end all swaps
                    problem = f"{type(error).__name__}: {error}"
                    if problem != self._last_problem:  # it looks several times a second
                        self._events.emit("swap_failed", reason=problem)
                    self._last_problem = problem

    def look(self) -> None:
        """Which routes are there, whom they serve, and what is new on each. Raises UserError as the registry."""
        wanted = self._most_used(self._registry.routes())
        for name in [name for name in self.routes if name not in wanted and name != DEFAULT_ROUTE]:
            self.routes.pop(name).leave()
        for name in wanted:
            if name not in self.routes:
                self.routes[name] = self._new_route(name)
        aliases = self._registry.assignments()
        if aliases != self._aliases:
            self._aliases = aliases
            self._engine.drafting.offer_aliases(aliases)
        for route in self.routes.values():
            route.look()

    def _most_used(self, routes: list[str]) -> set[str]:
        """As many as may be resident. One that is there stays until another has been asked for _STICKY_SECONDS later."""
        asked = self._engine.drafting.asked_at
        for name in [name for name in list(asked) if name not in routes]:  # names come from clients: not for ever
            asked.pop(name, None)

        def rank(name: str) -> float:
            return asked.get(name, 0.0) + (_STICKY_SECONDS if name in self.routes else 0.0)

        others = [name for name in routes if name != DEFAULT_ROUTE]
        return set(sorted(others, key=rank, reverse=True)[: self._max_drafts])


class RouteSwaps:
    """One route: what serves it and what is on trial."""

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        route: str,
        *,
        build: Callable[[DraftVersion], DraftModel],
        events: Events,
        serving: DraftVersion | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        self._engine, self._registry, self._route = engine, registry, route
        self._build, self._events = build, events
        self._serving, self._draft = serving, draft
        self.trial: Trial | None = None
        self._refused: set[str] = set()
        self._resumes_watch = True
        self._prior_seen: tuple[str, float] | None = None
        self._prior_seen_at = float("-inf")

    def leave(self) -> None:
        """The default route's draft serves instead."""
        self._engine.drafting.offer(None, self._route)

    def look(self) -> None:
        """Follow the registry, then judge what is on trial. Raises UserError as the registry."""
        serving, canary = self._registry.in_service(self._route), self._registry.canary(self._route)
        is_other = serving is not None and (self._serving is None or serving.id != self._serving.id)
        if serving is not None and is_other and serving.id not in self._refused:
            self._take_over(serving)
            return
        if self._resumes_watch:
            self._resumes_watch = False
            self._resume_watch()
        self._leave_failed_draft()
        if (
            self.trial is not None
            and self.trial.stage == "canary"
            and (canary is None or canary.id != self.trial.new.id)
        ):
            self._end_trial()  # withdrawn by an operator
        if self.trial is None and canary is not None:
            self._start_canary(canary)
        self._refresh_prior()
        if self.trial is not None:
            self._judge(self.trial, is_next_waiting=canary is not None and canary.id != self.trial.new.id)

    def _refresh_prior(self) -> None:
        """The trainer scores the draft in service whether or not it is drafted with: where it is not, this brings it back."""
        now = time.monotonic()
        if self._serving is None or now - self._prior_seen_at < _PRIOR_SECONDS:
            return
        self._prior_seen_at = now
        decision = self._registry.version(self._serving.id)["decision"] or {}
        seen = self._serving.id, decision.get("recent_alpha_at", 0.0)
        if "recent_alpha" in decision and seen != self._prior_seen:
            self._prior_seen = seen
            self._engine.drafting.offer_prior(self._serving.id, decision["recent_alpha"])

    # --- changes ----------------------------------------------------------------------------------------------------

    def _take_over(self, version: DraftVersion) -> None:
        """By an operator's word, or a roll-back."""
        draft = self._built(version)
        if draft is None:
            self._refused.add(version.id)
            if self._serving is not None:  # what serves now is the last good one
                self._registry.serve(self._serving.id, self._route, {})
                self._registry.set_aside(version.id, "cannot be served")
            return
        row = self._registry.version(version.id)
        before = self._registry.version(self._serving.id)["status"] if self._serving else "none"
        old, old_draft = self._serving, self._draft
        self._serving, self._draft = version, draft
        if before == "rolled_back" or old is None or old_draft is None:
            self._end_trial(prior=_alpha(row))
        else:
            self._start_trial("watched", version, draft, old, old_draft, row["decision"] or {})

    def _start_canary(self, canary: DraftVersion) -> None:
        draft = self._built(canary)
        if draft is None:
            self._registry.set_aside(canary.id, "cannot be served")
            return
        decision = self._registry.version(canary.id)["decision"] or {}
        if self._serving is None or self._draft is None or not self._pays():
            numbers = {"canary": "not needed", "watched": True}
            self._serving = self._registry.serve(canary.id, self._route, numbers, only_from=("canary",))
            self._draft = draft
            self._end_trial(prior=decision.get("alpha"))
            return
        self._start_trial("canary", canary, draft, self._serving, self._draft, decision)

    def _built(self, version: DraftVersion) -> DraftModel | None:
        try:
            return self._build(version)
        except UserError as error:
            self._events.emit("draft_refused", route=self._route, version=version.id, reason=str(error))
            return None

    def _pays(self) -> bool:
        """Whether the draft in service is drafted with at all."""
        route = self._engine.drafting.routes.get(self._route)
        service = route.service if route else None
        if service is None:
            return False
        fixed = service.lengths.fixed
        return service.lengths.best(1) > 0 if fixed is None else fixed > 0

    def _resume_watch(self) -> None:
        """A server that ended in the middle of a watch goes on with it."""
        if self._serving is None or self._draft is None or self._draft.version != self._serving.id:
            return
        decision = self._registry.version(self._serving.id)["decision"] or {}
        manifest = self._registry.manifest(decision.get("replaced", ""))
        if decision.get("watched") or not manifest:
            return
        old = DraftVersion(**manifest)
        old_draft = self._built(old) if self._registry.weights_path(old.id).exists() else None
        if old_draft is not None:
            self._start_trial("watched", self._serving, self._draft, old, old_draft, decision)

    def _leave_failed_draft(self) -> None:
        """The draft in service has failed outside a trial: the version before it, if there is one, is better than none."""
        if self.trial is not None or self._serving is None or self._serving.id in self._refused:
            return
        failure = self._engine.drafting.failures.get(self._serving.id)
        if failure is not None:
            self._refused.add(self._serving.id)
            with contextlib.suppress(UserError):
                self._registry.roll_back(self._route, {"watch": f"it failed: {failure}"})

    def _start_trial(
        self, stage: Stage, new: DraftVersion, new_draft: DraftModel, old: DraftVersion, old_draft: DraftModel,
        decision: dict[str, Any],
    ) -> None:  # fmt: skip
        self.trial = Trial(
            stage=stage, new=new, new_draft=new_draft, old=old, old_draft=old_draft, decision=decision,
            started={one.id: self._counts(one) for one in (new, old)}, started_at=time.monotonic(),
        )  # fmt: skip
        alpha = decision.get("alpha")
        if stage == "canary":
            lineup = Lineup(service=old_draft, second=new_draft, second_prior=alpha, share=CANARY_SHARE)
        else:
            lineup = Lineup(service=new_draft, prior=alpha, second=old_draft, share=CANARY_SHARE)
        self._engine.drafting.offer(lineup, self._route)
        self._events.emit(
            "trial_started", route=self._route, version=new.id, against=old.id, stage=stage, share=CANARY_SHARE
        )

    def _end_trial(self, prior: float | None = None) -> None:
        """Only what is in service stays resident."""
        self.trial = None
        self._engine.drafting.offer(Lineup(service=self._draft, prior=prior), self._route)

    # --- the watch --------------------------------------------------------------------------------------------------

    def _counts(self, version: DraftVersion) -> LiveCounts:
        return LiveCounts.of(self._engine.stats_by_version.get((self._route, version.id)))

    def _judge(self, trial: Trial, *, is_next_waiting: bool) -> None:
        failures = self._engine.drafting.failures
        failure = failures.get(trial.new.id)
        new, old = (self._counts(one).since(trial.started[one.id]) for one in (trial.new, trial.old))
        judgement = judge(trial.stage, new, old, expected=trial.decision.get("parent_alpha"))
        if failure is not None:
            judgement = Judgement(finding="worse", reason=f"it failed: {failure}", numbers=judgement.numbers)
        numbers = {
            **judgement.numbers,
            "watch": judgement.reason,
            "seconds": round(time.monotonic() - trial.started_at, 1),
        }
        if judgement.finding == "worse":
            self._roll_back(trial, numbers)
        elif judgement.finding == "fine" and trial.stage == "canary":
            numbers["replaced"] = trial.old.id
            self._serving = self._registry.serve(trial.new.id, self._route, numbers, only_from=("canary",))
            self._draft = trial.new_draft
            self._events.emit(
                "canary_confirmed", route=self._route, version=trial.new.id, previous=trial.old.id, **numbers
            )
            self._start_trial("watched", trial.new, trial.new_draft, trial.old, trial.old_draft, trial.decision)
        elif (
            judgement.finding == "fine"
            or (is_next_waiting and new.num_rounds >= CANARY_ROUNDS)
            or trial.old.id in failures
        ):
            self._registry.note(trial.new.id, {"watched": True})
            self._events.emit("watch_ended", route=self._route, version=trial.new.id, previous=trial.old.id, **numbers)
            self._end_trial()

    def _roll_back(self, trial: Trial, numbers: dict[str, Any]) -> None:
        self._registry.undo_trial(trial.new.id, trial.old.id, self._route, numbers, is_canary=trial.stage == "canary")
        self._serving, self._draft = trial.old, trial.old_draft
        self._events.emit(
            "draft_rolled_back", route=self._route, version=trial.new.id, previous=trial.old.id, **numbers
        )
        self._end_trial()


def _alpha(row: dict[str, Any]) -> float | None:
    alpha: float | None = (row["decision"] or {}).get("alpha")
    return alpha
