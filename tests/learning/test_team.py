"""Several workers in one training process, on the toy language: who learns from what, and what a restart keeps."""

import dataclasses

import pytest

from livedraft.config import LearningConfig, RoutingConfig
from livedraft.drafts.database import read_events, read_status, write_status
from livedraft.drafts.registry import ROUTING_STATUS, Registry
from livedraft.events import described
from livedraft.learning.capture import conversation_key
from livedraft.learning.store import TraceStore
from livedraft.learning.team import Team
from livedraft.learning.worker import Worker
from livedraft.records import DEFAULT_ROUTE, UserError
from tests.learning.test_worker import state  # noqa: F401  # the fixture
from tests.learning.toy import served_traces

SETTINGS = {"traces_per_chunk": 4, "max_passes": 2, "learning_rate": 3e-3, "replay_spacing": 0.0, "warmup_steps": 0}


def team(state, **routing):  # noqa: F811
    return Team(
        state=state, target=state.parent / "model", config=LearningConfig(**SETTINGS), max_positions=128,
        routing=RoutingConfig(**{"min_requests": 16, **routing}),
    )  # fmt: skip


def serve_into(state, streams, count, first=0):  # noqa: F811
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


def test_a_stream_that_is_large_enough_gets_a_copy_and_learns_from_its_own_requests(state):  # noqa: F811
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


def test_without_routing_it_is_one_worker(state):  # noqa: F811
    serve_into(state, ["a", "b"], 40)
    one = team(state, enabled=False)
    settle(one)
    assert list(one.workers) == [DEFAULT_ROUTE]
    assert learnt_from(one, DEFAULT_ROUTE) == {"a", "b"}
    assert read_status(state, ROUTING_STATUS) == {}


def test_a_restart_keeps_routes_versions_and_what_was_trained(state):  # noqa: F811
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


def test_a_closed_routes_traffic_is_the_default_ones_again(state):  # noqa: F811
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


def test_every_draft_is_scored_before_anybody_trains(state, monkeypatch):  # noqa: F811
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


def test_a_database_that_cannot_be_written_costs_a_turn(state, monkeypatch):  # noqa: F811
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
def test_odd_rows_of_an_earlier_process_do_no_harm(state, kept):  # noqa: F811
    write_status(state, ROUTING_STATUS, kept)
    one = team(state)
    serve_into(state, ["a", "b"], 8)
    settle(one)
    assert list(one.workers) == [DEFAULT_ROUTE]


def test_a_route_for_which_memory_is_short_closes_and_the_others_learn_on(state, monkeypatch):  # noqa: F811
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


def test_a_route_whose_weights_are_damaged_is_closed_at_start(state):  # noqa: F811
    one = team(state)
    serve_into(state, ["a", "a", "b"], 36)
    settle(one)
    one.registry.weights_path(one.registry.in_service("a").id).write_bytes(b"damaged")
    again = team(state)
    assert list(again.workers) == [DEFAULT_ROUTE]
    assert again.registry.routes() == [DEFAULT_ROUTE]
