"""Several workers in one training process, on the toy language: who learns from what, and what a restart keeps."""

import dataclasses

import pytest
import torch

from livedraft.config import LearningConfig, RoutingConfig
from livedraft.drafts.database import read_events, read_status, write_status
from livedraft.drafts.registry import ROUTING_STATUS, Registry
from livedraft.events import described
from livedraft.learning.capture import conversation_key
from livedraft.learning.pacing import Pacing
from livedraft.learning.store import Streams, TraceStore
from livedraft.learning.team import Team
from livedraft.learning.worker import Worker
from livedraft.records import DEFAULT_ROUTE, UserError
from tests.learning.toy import served_traces

SETTINGS = {"traces_per_chunk": 4, "max_passes": 2, "learning_rate": 3e-3, "replay_spacing": 0.0, "warmup_steps": 0}


def team(state, **routing):
    return Team(
        state=state, target=state.parent / "model", config=LearningConfig(**SETTINGS), max_positions=128,
        routing=RoutingConfig(**{"min_requests": 16, **routing}),
    )  # fmt: skip


def serve_into(state, streams, count, first=0):
    """`count` requests, of the given streams in turn."""
    registry, routes = Registry(state), Registry(state).routes()
    traces = []
    for n, trace in enumerate(served_traces(count, first=first)):
        stream = streams[n % len(streams)]
        route = stream if stream in routes else DEFAULT_ROUTE
        version = registry.in_service(route).id
        key = conversation_key([first + n], b"key")
        traces.append(dataclasses.replace(trace, route=stream, draft_version=version, conversation_key=key))
    TraceStore(state).append(traces)


def settle(one):
    for _ in range(400):
        if not one.turn():
            return
        for route in one.workers:
            canary = one.registry.canary(route)
            if canary is not None:
                one.registry.serve(canary.id, route, {})
    raise AssertionError("it never came to rest")


def learnt_from(one, route):
    rows = {row.id: row.route for row in one.store.rows()}
    return {rows[trace_id] for trace_id in one.workers[route].memory.examples}


def test_a_stream_that_is_large_enough_gets_a_copy_and_learns_from_its_own_requests(state):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 12)
    settle(one)
    assert one.registry.routes() == [DEFAULT_ROUTE]
    serve_into(state, ["a", "a", "b"], 24, first=12)
    settle(one)
    assert one.registry.routes() == [DEFAULT_ROUTE, "a"]
    before = one.workers[DEFAULT_ROUTE].memory.num_trained
    first = one.registry.in_service("a")
    assert first.parent is not None
    serve_into(state, ["a", "b"], 32, first=36)
    settle(one)
    assert learnt_from(one, "a") == {"a"}
    assert one.workers["a"].memory.num_trained >= 12
    assert before < one.workers[DEFAULT_ROUTE].memory.num_trained <= before + 16
    assert read_status(state, "trainer:a")["num_steps"] == one.workers["a"].trainer.num_steps > 0
    sentences = [described(event) for event in read_events(state) if event["event"] == "route_open"]
    assert sentences == ["Route a gets a draft of its own, a copy of that of default, after 24 requests."]


def opened(state):
    """A team that has learnt from all streams, has just given "a" a draft of its own, and has not gone on yet."""
    one = team(state)
    serve_into(state, ["a", "a", "b"], 21)
    settle(one)
    serve_into(state, ["a", "a", "b"], 15, first=21)
    one._look_at_streams()
    assert "a" in one.workers
    return one


def test_a_copy_goes_on_where_its_sources_trainer_is(state, monkeypatch):
    # Heads as large as the traffic asks for: what the source has seen must still be sayable after the copy's first step.
    monkeypatch.setattr("livedraft.learning.vocabulary._SPARE", 4)
    monkeypatch.setattr("livedraft.learning.vocabulary._STEP", 4)
    one = opened(state)
    source, copy = one.workers[DEFAULT_ROUTE], one.workers["a"]
    assert source.trainer.num_steps > 0
    for name, tensor in source.trainer.state_tensors().items():
        assert torch.equal(tensor, copy.trainer.state_tensors()[name]), name
    assert copy.memory.copies == source.memory.copies
    assert copy.memory.vocabulary.used() == source.memory.vocabulary.used() != []
    serve_into(state, ["a", "b"], 16, first=36)
    settle(one)
    used = {token for token, mass in copy.memory.vocabulary.used() if mass >= 0.5}
    assert used <= set(copy.trainer.draft_to_target_W.tolist())
    assert max(copy.memory.copies.values()) <= SETTINGS["max_passes"]


def test_a_kill_after_an_opening_trains_on_nothing_twice(state):
    one = opened(state)
    copies = one.workers["a"].memory.copies
    assert copies
    assert team(state).workers["a"].memory.copies == copies


def test_a_draft_is_trained_and_judged_on_the_streams_it_serves_alone(state):
    one = opened(state)
    default = one.workers[DEFAULT_ROUTE]
    assert {example.stream for example in default.memory.examples.values()} == {"a", "b"}
    assert {example.stream for example in default.memory.evidence(0)} == {"b"}
    assert {example.stream for example in default.memory.replayed(100, is_hurried=True)} <= {"b"}
    assert {example.stream for example in default.memory.since_drift()} == {"b"}
    one.registry.close_route("a", {"closed": "by an operator"})
    one.turn()
    assert {example.stream for example in default.memory.evidence(0)} == {"a", "b"}


def test_a_change_of_streams_is_no_drift(state):
    one = team(state)
    serve_into(state, ["a", "b"], 8)
    settle(one)
    default = one.workers[DEFAULT_ROUTE]
    assert default.drift.recent
    default.serve(default.memory.streams)
    assert default.drift.recent
    default.serve(Streams(names=("a",)))
    assert not default.drift.recent


def test_nobody_replays_while_anothers_new_requests_wait(state, monkeypatch):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    events = []
    train, replay = Worker._train, Worker._step
    monkeypatch.setattr(Worker, "_train", lambda self, *batch: events.append("new") or train(self, *batch))
    monkeypatch.setattr(Worker, "_step", lambda self, batch: events.append("step") or replay(self, batch))
    serve_into(state, ["a"] * 5 + ["b"], 48, first=36)
    settle(one)
    last_new = len(events) - 1 - events[::-1].index("new")
    assert events[:last_new].count("step") == events[:last_new].count("new")


def test_while_requests_come_no_more_are_scored_under_all_drafts_than_the_level_has(state, monkeypatch):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    asked = []
    monkeypatch.setattr(Team, "_alphas", lambda self, rows: asked.append(len(rows)) or {})
    monkeypatch.setattr(Pacing, "is_lively", property(lambda self: True))
    serve_into(state, ["a", "b"], 16, first=36)
    one._look_at_streams()
    assert asked == [16 // 8]


def test_steps_are_counted_over_a_fresh_start(state):
    one = team(state)
    serve_into(state, ["a", "b"], 16)
    settle(one)
    steps = one.num_steps
    worker = one.workers[DEFAULT_ROUTE]
    assert steps == worker.trainer.num_steps > 0
    worker.trainer.restart_from(worker.served_weights())
    assert one.num_steps == steps


def test_without_routing_it_is_one_worker(state):
    serve_into(state, ["a", "b"], 40)
    one = team(state, enabled=False)
    settle(one)
    assert list(one.workers) == [DEFAULT_ROUTE]
    assert learnt_from(one, DEFAULT_ROUTE) == {"a", "b"}
    assert read_status(state, ROUTING_STATUS) == {}


def test_a_restart_keeps_routes_versions_and_what_was_trained(state):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    serve_into(state, ["a", "b"], 32, first=36)
    settle(one)
    for worker in one.workers.values():
        worker.checkpoint()
    again = team(state)
    assert list(again.workers) == list(one.workers) == [DEFAULT_ROUTE, "a"]
    for route, worker in again.workers.items():
        assert worker.in_service.id == one.workers[route].in_service.id
        assert worker.trainer.num_steps == one.workers[route].trainer.num_steps
    steps = again.num_steps
    settle(again)
    assert again.num_steps == steps  # nothing is trained on again


def test_a_closed_routes_traffic_is_the_default_ones_again(state):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    one.workers["a"].checkpoint()
    before, flops = one.workers[DEFAULT_ROUTE].memory.num_trained, one.train_flops
    one.registry.close_route("a", {"closed": "by an operator"})
    serve_into(state, ["a"], 16, first=36)
    settle(one)
    assert list(one.workers) == [DEFAULT_ROUTE]
    assert one.train_flops > flops  # what the closed one's trainer took still counts
    assert one.routing.route_of("a") == DEFAULT_ROUTE
    assert not list(state.glob("trainer.a.*"))
    assert one.workers[DEFAULT_ROUTE].memory.num_trained >= before + 8


def test_every_draft_is_scored_before_anybody_trains(state, monkeypatch):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    scored, trained = [], []
    look, train = Team.alphas_by_route, Worker._train
    monkeypatch.setattr(
        Team,
        "alphas_by_route",
        lambda self, examples: scored.extend(e.trace_id for e in examples) or look(self, examples),
    )
    monkeypatch.setattr(
        Worker, "_train", lambda self, new, old: trained.append((max(e.trace_id for e in new), len(scored)))
        or train(self, new, old),
    )  # fmt: skip
    serve_into(state, ["a", "b"], 16, first=36)
    settle(one)
    assert len(scored) == 8
    assert trained and all(num_scored == 8 for _, num_scored in trained)


def test_a_database_that_cannot_be_written_costs_a_turn(state, monkeypatch):
    one = team(state)
    serve_into(state, ["a", "b"], 8)

    def full(*_):
        raise UserError("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("livedraft.learning.team.write_status", full)
        one.turn()
    assert one.workers[DEFAULT_ROUTE].reports.last_problem == "the disk is full."
    settle(one)
    assert one.routing._num_requests == {"a": 4, "b": 4}


@pytest.mark.parametrize("kept", [{"assignments": {"a": "gone"}}, {"last_trace_id": 3}])
def test_odd_rows_of_an_earlier_process_do_no_harm(state, kept):
    write_status(state, ROUTING_STATUS, kept)
    one = team(state)
    serve_into(state, ["a", "b"], 8)
    settle(one)
    assert list(one.workers) == [DEFAULT_ROUTE]


def test_a_route_for_which_memory_is_short_closes_and_the_others_learn_on(state, monkeypatch):
    one = team(state)

    def short(*_):
        raise UserError("Training this draft needs about 9.0 GiB and the machine has 1.0 free.")

    with monkeypatch.context() as patch:
        patch.setattr("livedraft.learning.worker.require_memory", short)
        serve_into(state, ["a", "a", "b"], 36)
        settle(one)
    assert one.registry.routes() == list(one.workers) == [DEFAULT_ROUTE]
    assert one.routing.open == []
    assert one.workers[DEFAULT_ROUTE].memory.num_trained > 20
    closed = [event for event in read_events(state) if event["event"] == "route_close"]
    assert len(closed) == 1 and "needs about 9.0 GiB" in closed[0]["reason"]


def test_a_route_whose_weights_are_damaged_is_closed_at_start(state):
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    one.registry.weights_path(one.registry.in_service("a").id).write_bytes(b"damaged")
    again = team(state)
    assert list(again.workers) == [DEFAULT_ROUTE]
    assert again.registry.routes() == [DEFAULT_ROUTE]
