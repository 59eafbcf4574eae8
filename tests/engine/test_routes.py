"""Several routes in one engine: each request is drafted for by its own route's draft, and nothing but speed depends on it."""

import dataclasses

import pytest

from livedraft.drafts.database import write_status
from livedraft.drafts.registry import ROUTING_STATUS, new_version_id
from livedraft.drafts.weights import save_draft
from livedraft.engine.drafting import Lineup
from livedraft.records import DEFAULT_ROUTE, DraftVersion
from tests.engine.test_swap import FAIR, GOOD, MODEL, Stage
from tests.tiny import PROMPTS, decoder, draft_model, engine, perturbed_draft, request, serve

PLAIN = serve(engine(decoder(MODEL), None), [request(p, i) for i, p in enumerate(PROMPTS)])
SAMPLED = {"temperature": 0.8, "seed": 5}
PLAIN_SAMPLED = serve(engine(decoder(MODEL), None), [request(p, i, **SAMPLED) for i, p in enumerate(PROMPTS)])


def on(route, one):
    return dataclasses.replace(one, route=route)


def routed_engine(*, k=3, noise=(0.0, 0.05, 0.5), **options):
    target = decoder(MODEL)
    drafts = [
        draft_model(perturbed_draft(MODEL, noise=n), target, version=v) for n, v in zip(noise, ("d", "one", "two"))
    ]
    served = engine(target, drafts[0], k=k, **options)
    for route, draft in zip(("one", "two"), drafts[1:]):
        served.drafting.offer(Lineup(service=draft), route)
    return served, drafts


def versions(served):
    return {key for key, stats in served.stats_by_version.items() if stats.num_drafts}


@pytest.mark.parametrize(("sampling", "plain"), [({}, PLAIN), (SAMPLED, PLAIN_SAMPLED)])
@pytest.mark.parametrize("k", [3, None])
def test_requests_of_several_routes_in_one_round_get_their_own_draft_and_the_same_answer(sampling, plain, k):
    served, _ = routed_engine(k=k)
    routes = ["one", "two", "unknown", DEFAULT_ROUTE]
    assert serve(served, [on(r, request(p, i, **sampling)) for i, (r, p) in enumerate(zip(routes, PROMPTS))]) == plain
    if k is not None:
        assert versions(served) == {("one", "one"), ("two", "two"), (DEFAULT_ROUTE, "d")}


@pytest.mark.parametrize(("sampling", "plain"), [({}, PLAIN), (SAMPLED, PLAIN_SAMPLED)])
def test_a_route_may_open_move_and_end_under_running_requests(sampling, plain):
    served, drafts = routed_engine()
    states = [served.add_request(on("one", request(p, i, **sampling))) for i, p in enumerate(PROMPTS)]
    changes = iter([
        lambda: served.drafting.offer_aliases({"one": "two"}),
        lambda: served.drafting.offer(None, "two"),
        lambda: served.drafting.offer_aliases({}),
        lambda: served.drafting.offer(None, "one"),
        lambda: served.drafting.offer(Lineup(service=drafts[2], second=drafts[1], share=0.5), "one"),
    ])  # fmt: skip
    while served.has_work:
        served.step()
        served.step()
        next(changes, lambda: None)()
    assert [state.output_token_ids for state in states] == plain
    assert {version for _, version in versions(served)} == {"d", "one", "two"}


def test_a_stream_given_to_another_route_is_counted_there():
    served, _ = routed_engine()
    served.drafting.offer_aliases({"mine": "two", "lost": "nowhere"})
    serve(served, [on(r, request(p, i)) for i, (r, p) in enumerate(zip(("mine", "lost"), PROMPTS))])
    assert versions(served) == {("two", "two"), (DEFAULT_ROUTE, "d")}


def test_one_draft_may_serve_two_routes_each_with_its_own_acceptance():
    served, drafts = routed_engine()
    served.drafting.offer(Lineup(service=drafts[0], prior=0.9), "one")
    serve(served, [on(r, request(p, i)) for i, (r, p) in enumerate(zip(("one", DEFAULT_ROUTE), PROMPTS))])
    assert versions(served) == {("one", "d"), (DEFAULT_ROUTE, "d")}
    routes = served.drafting.routes
    assert routes["one"].service.draft is routes[DEFAULT_ROUTE].service.draft
    assert routes["one"].service.lengths is not routes[DEFAULT_ROUTE].service.lengths


def test_a_draft_that_fails_is_out_on_its_route_alone():
    served, drafts = routed_engine()
    drafts[1].propose = lambda tasks: 1 / 0
    assert serve(served, [on(r, request(p, i)) for i, (r, p) in enumerate(zip(("one", "two"), PROMPTS))]) == PLAIN[:2]
    assert list(served.drafting.failures) == ["one"]
    assert served.drafting.routes["one"].service is None
    assert served.drafting.routes["two"].service is not None


def test_a_request_makes_no_new_memory_for_texts():
    """An empty one is megabytes, made on the engine's thread."""
    served, _ = routed_engine(suffixes=True)
    made, make = [], served.new_traffic
    served.new_traffic = lambda: made.append(1) or make()
    for n in range(3):
        serve(served, [on(r, request(p, 10 * n + i)) for i, (r, p) in enumerate(zip(("one", "two", "other"), PROMPTS))])
    served.expect_texts(["default", "one", "two"])
    assert sum(made) <= len(served.traffic) == 3  # the third is the default route's


def test_a_new_route_starts_with_the_texts_its_stream_left_on_the_default_one():
    served, drafts = routed_engine(suffixes=True, noise=(0.9, 0.9, 0.9), k=None, prior=0.0)
    served.drafting.withdraw_offer()
    (first,) = serve(served, [on("new", request(PROMPTS[0], 0))])
    before = served.stats.num_target_passes
    served.drafting.offer(Lineup(service=drafts[1], prior=0.0), "new")
    served.take_up_offered_draft()
    assert serve(served, [on("new", request(PROMPTS[0], 1))]) == [first]
    assert served.stats.num_target_passes - before < len(first) / 2
    assert served.traffic["new"] is not served.traffic["default"]
    served.forget_prefixes()
    served.step()
    assert [texts.num_tokens for texts in served.traffic.values()] == [0, 0]


def test_a_route_whose_texts_are_on_their_way_starts_empty():
    served, _ = routed_engine(suffixes=True)
    served.expect_texts(["one"])
    serve(served, [request(PROMPTS[0], 0)])
    served.add_request(on("one", request(PROMPTS[1], 1)))
    assert served.traffic["one"].num_tokens == 0 < served.traffic["default"].num_tokens


def test_the_report_names_each_routes_drafts():
    served, drafts = routed_engine()
    served.drafting.offer(Lineup(service=drafts[1], second=drafts[2], share=0.5), "one")
    served.take_up_offered_draft()
    rows = {(row["route"], row["version"], row["is_second"]) for row in served.drafting.report(1)}
    assert rows == {(DEFAULT_ROUTE, "d", False), ("one", "one", False), ("one", "two", True), ("two", "two", False)}


# --- following the registry -----------------------------------------------------------------------------------------


def opened(stage, route, weights):
    version = DraftVersion(
        id=new_version_id(len(stage.registry.versions())), route=route, parent=None, sha256="",
        target_fingerprint=MODEL.fingerprint, tokenizer_fingerprint="t", num_layers=weights.num_layers,
        vocabulary_size=weights.vocabulary_size, created_at=0.0,
    )  # fmt: skip
    return stage.registry.publish(lambda path: save_draft(weights, path), version, status="in_service")


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, FAIR)
    made.watcher._max_drafts = 2
    yield made
    made.watcher.close()


def serve_on(stage, route):
    stage.num_served += 1
    return serve(stage.served, [on(route, request([stage.num_served % 64, 3, 5], stage.num_served))])


def test_a_route_of_the_registry_is_served_until_it_is_closed(stage):
    version = opened(stage, "shop", GOOD)
    stage.watcher.look()
    serve_on(stage, "shop")
    assert ("shop", version.id) in versions(stage.served)
    write_status(stage.registry.state, ROUTING_STATUS, {"assignments": {"tools": "shop"}})
    stage.watcher.look()
    serve_on(stage, "tools")
    assert stage.served.drafting.route_of(on("tools", request([1]))) == "shop"
    stage.registry.close_route("shop", {"closed": "test"})
    stage.watcher.look()
    serve_on(stage, "shop")
    assert list(stage.served.drafting.routes) == [DEFAULT_ROUTE]
    assert stage.registry.routes() == [DEFAULT_ROUTE]
    names = [event["event"] for event in stage.seen]
    assert names.count("draft_swapped") == 2


def test_a_routes_canary_is_tried_on_its_own_requests_alone(stage):
    first = opened(stage, "shop", FAIR)
    stage.watcher.look()
    serve_on(stage, "shop")
    version = dataclasses.replace(first, id=new_version_id(9), parent=first.id)
    stage.registry.publish(lambda path: save_draft(GOOD, path), version)
    stage.registry.start_canary(version.id, {"alpha": 0.9, "parent_alpha": 0.9})
    for _ in range(40):
        stage.watcher.look()
        serve_on(stage, "shop")
        serve_on(stage, DEFAULT_ROUTE)
    assert stage.registry.in_service("shop").id == version.id
    assert stage.registry.in_service(DEFAULT_ROUTE).id == stage.first.id
    assert (DEFAULT_ROUTE, version.id) not in versions(stage.served)


def test_the_least_used_routes_make_room_and_come_back_when_asked_for(stage, monkeypatch):
    monkeypatch.setattr("livedraft.engine.swap._STICKY_SECONDS", 0.0)
    for route in ("a", "b", "c"):
        opened(stage, route, GOOD)
    for route in ("a", "b", "c"):
        serve_on(stage, route)
    stage.watcher.look()
    serve_on(stage, DEFAULT_ROUTE)
    assert set(stage.served.drafting.routes) == {DEFAULT_ROUTE, "b", "c"}
    serve_on(stage, "a")  # by the default route's draft
    stage.watcher.look()
    serve_on(stage, "a")
    assert set(stage.served.drafting.routes) == {DEFAULT_ROUTE, "a", "c"}
