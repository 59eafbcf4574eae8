"""The training process: `python -m livedraft.learning --state DIR --target FILE --settings JSON`. One worker a route,
taking turns, and the streams of traffic shared out among them.

It talks to the serving process through the state folder only (store, registry, status rows, events), and ends when the pipe on
its standard input closes. Serving never waits for it. One turn:
  1. new requests are told to `Routing`, a sample of them scored under every route's draft, before anybody trains on them;
  2. what it decides is done: a route opens with a copy of the draft that served its stream, streams move, a route closes;
  3. every worker has its turn (`worker.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from livedraft.config import LearningConfig, RoutingConfig
from livedraft.drafts.database import read_controls, read_status, record_events, write_status
from livedraft.drafts.registry import ROUTING_STATUS, Registry, new_version_id
from livedraft.drafts.weights import save_draft
from livedraft.learning.allowance import Allowance
from livedraft.learning.batches import Example, example_from_trace
from livedraft.learning.process import EXIT_BAD_INPUT, checkpoint_name
from livedraft.learning.routing import SAMPLE, Change, Routing
from livedraft.learning.store import TraceRow, TraceStore
from livedraft.learning.trainer import NotEnoughMemoryError
from livedraft.learning.worker import POLL_SECONDS, Worker
from livedraft.records import DEFAULT_ROUTE, UserError

MAX_LOOKED_AT_A_TURN = 64
POLL_BESIDE_REQUESTS_SECONDS = 0.5
"""A turn looks into the database a few times: too much for ten times a second beside requests."""
_MAX_CHANGES = 8


class Team:
    def __init__(
        self, *, state: Path, target: Path, config: LearningConfig, routing: RoutingConfig, max_positions: int
    ) -> None:
        """Raises UserError as `Worker`: the default route has to have a draft."""
        self.state, self.target, self.config, self.max_positions = state, target, config, max_positions
        self.store, self.registry = TraceStore(state), Registry(state)
        self.workers: dict[str, Worker] = {}
        self._allowance = Allowance(state, config.level)
        self.routing = Routing(routing)
        self.is_routing = routing.enabled
        self._last_trace_id = self._num_steps_closed = 0
        self._flops_closed = 0.0
        if self.is_routing:
            known = read_status(state, ROUTING_STATUS)
            self.routing.restore(known, self.registry.routes())
            self._last_trace_id = int(known.get("last_trace_id", 0))
        self.workers[DEFAULT_ROUTE] = Worker(
            state=state, target=target, route=DEFAULT_ROUTE, config=config, max_positions=max_positions,
            has_had_its_share=self._has_had_its_share, streams=self.routing.streams_of(DEFAULT_ROUTE),
        )  # fmt: skip
        for route in list(self.routing.open):
            self._hire(route)
        self._share_out()

    def _hire(self, route: str) -> None:
        """A worker for a route that is open; one that cannot have any, for want of memory or of its weights, is closed."""
        try:
            self.workers[route] = self._worker(route)
        except UserError as error:
            self._apply(Change(kind="close", stream=route, route=route, reason=str(error)))

    def _worker(self, route: str) -> Worker:
        default = self.workers[DEFAULT_ROUTE]
        config = self.config
        if config.learning_rate is None and default.rate_trial is None:  # what suits the target has been tried
            config = replace(config, learning_rate=default.trainer.base_rate)
        return Worker(
            state=self.state, target=self.target, route=route, config=config, max_positions=self.max_positions,
            parts=default.trainer.target, has_had_its_share=self._has_had_its_share, streams=self.routing.streams_of(route),
        )  # fmt: skip

    def _has_had_its_share(self, seconds_since_busy: float) -> bool:
        return self._allowance.is_spent(self.train_flops, seconds_since_busy)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for worker in self.workers.values():
            worker.reports.status("waiting for traces")
        while True:
            if not self.turn():
                time.sleep(POLL_BESIDE_REQUESTS_SECONDS if self._is_beside_requests() else POLL_SECONDS)

    def _is_beside_requests(self) -> bool:
        return self.config.level == "gentle" and any(worker.pacing.is_lively for worker in self.workers.values())

    def turn(self) -> bool:
        """False when nobody had anything to do."""
        try:
            if self.is_routing and not self.workers[DEFAULT_ROUTE].controls["paused"]:
                self._look_at_streams()
        except UserError as error:  # the disk is full, or the database locked: it tries again
            self.workers[DEFAULT_ROUTE].reports.problem(str(error))
        turns = []
        for worker in list(self.workers.values()):
            worker.may_replay = not any(one.memory.has_new_chunk for one in self.workers.values() if one is not worker)
            turns.append(worker.safe_turn())
        return any(turns)

    # --- streams ----------------------------------------------------------------------------------------------------

    def _look_at_streams(self) -> None:
        self._follow_registry()
        rows = self.store.rows(after_id=self._last_trace_id, limit=MAX_LOOKED_AT_A_TURN)
        every = max(SAMPLE, self.workers[DEFAULT_ROUTE].pacing.scored_of)
        alphas = self._alphas([row for row in rows if self.routing.is_sampled(row.id, every)])
        for row in rows:
            self.routing.see(row.route, alphas.get(row.id))
            self._last_trace_id = row.id
        if not rows:
            return
        for _ in range(_MAX_CHANGES):  # one may make way for another
            changes = self.routing.changes()
            for change in changes:
                self._apply(change)
            if not changes:
                break
        self._keep_routing()

    def _keep_routing(self) -> None:
        write_status(self.state, ROUTING_STATUS, {**self.routing.state(), "last_trace_id": self._last_trace_id})

    def _follow_registry(self) -> None:
        """An operator may have closed a route, or put a version of a closed one into service."""
        kept = self.registry.routes()
        for route in [route for route in kept if route not in self.workers]:
            self.routing.apply(Change(kind="open", stream=route, route=DEFAULT_ROUTE, reason="an operator opened it"))
            self._hire(route)
            self._share_out()
        for route in [route for route in self.routing.open if route not in kept]:
            self._apply(Change(kind="close", stream=route, route=route, reason="an operator closed it"))

    def _alphas(self, rows: list[TraceRow]) -> dict[int, dict[str, float]]:
        """Of each sampled request."""
        examples: list[Example] = []
        for row in rows:
            trace = self.store.read(row)
            if trace is not None and self.workers[DEFAULT_ROUTE].can_use(trace):
                examples.append(example_from_trace(trace, row.id))
        return dict(zip((example.trace_id for example in examples), self.alphas_by_route(examples), strict=True))

    def alphas_by_route(self, examples: Sequence[Example]) -> list[dict[str, float]]:
        """Acceptance of requests nobody has trained on, under every route's draft in service."""
        found: list[dict[str, float]] = [{} for _ in examples]
        for route, worker in self.workers.items() if examples else ():
            for alphas, score in zip(found, worker.scores_now(examples), strict=True):
                alphas[route] = score.alpha
        return found

    @property
    def num_steps(self) -> int:
        """Of all workers in this process, those of closed routes included; it never falls."""
        return self._num_steps_closed + sum(worker.num_steps_taken for worker in self.workers.values())

    @property
    def train_flops(self) -> float:
        """As `num_steps`; it never falls, or the allowance would grow with each route that closes."""
        return self._flops_closed + sum(worker.trainer.flops for worker in self.workers.values())

    def _apply(self, change: Change) -> None:
        if change.kind == "open":
            self._open(change)
        else:
            self.routing.apply(change)
        if change.kind == "close":
            self._close(change)
        self._share_out()
        self._keep_routing()
        fields = {"stream": change.stream, "route": change.route, "reason": change.reason}
        record_events(self.state, [{"event": f"route_{change.kind}", "time": time.time(), **fields}])

    def _open(self, change: Change) -> None:
        source = self.workers[change.route]
        weights = source.served_weights()
        version = replace(
            source.in_service, id=new_version_id(0), route=change.stream, parent=source.in_service.id,
            created_at=time.time(),
        )  # fmt: skip
        self.registry.publish(lambda path: save_draft(weights, path), version, status="in_service")
        self.registry.note(version.id, {"alpha": self.routing.alpha(change.stream, change.route)})
        self.routing.apply(change)
        self._hire(change.stream)
        if change.stream in self.workers:
            self.workers[change.stream].start_as_copy_of(source)

    def _close(self, change: Change) -> None:
        left = self.workers.pop(change.route, None)
        if left is not None:
            self._num_steps_closed += left.num_steps_taken
            self._flops_closed += left.trainer.flops
        self.registry.close_route(change.route, {"closed": change.reason})
        (self.state / checkpoint_name(change.route)).unlink(missing_ok=True)

    def _share_out(self) -> None:
        for route, worker in self.workers.items():
            worker.serve(self.routing.streams_of(route))


def main() -> None:
    parser = argparse.ArgumentParser(description="livedraft's training process; started by the serving process.")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--max-positions", type=int, default=2048)
    parser.add_argument("--settings", default="{}", help="LearningConfig as JSON")
    parser.add_argument("--routing", default="{}", help="RoutingConfig as JSON")
    arguments = parser.parse_args()
    config = LearningConfig(**json.loads(arguments.settings))
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    try:
        team = Team(
            state=arguments.state,
            target=arguments.target,
            config=config,
            routing=RoutingConfig(**json.loads(arguments.routing)),
            max_positions=arguments.max_positions,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if _is_final(error, arguments.state) else 1)
    team.run()


def _is_final(error: UserError, state: Path) -> bool:
    """Whether starting again would meet the same error: not where memory or the state folder are only short for now."""
    if isinstance(error, NotEnoughMemoryError):
        return False
    try:
        read_controls(state)
    except UserError:
        return False
    return True
