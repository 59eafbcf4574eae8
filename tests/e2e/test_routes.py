"""Two streams of traffic through a real engine and its training process: a route of its own, served, kept, and given up."""

import time

import pytest

from livedraft import LLM, SamplingParams
from livedraft.config import LearningConfig, RoutingConfig
from livedraft.drafts.router import TOPICS_NAME
from livedraft.operations import close_route, list_routes
from livedraft.records import DEFAULT_ROUTE, RouteHints
from tests.e2e.test_learning_process import wait_for

SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)


def opened(model_folder, state, **options):
    return LLM(
        str(model_folder), state=state, dtype="float32", num_threads=1, **{"learn": True, **options},
        learning=LearningConfig(level="on", traces_per_chunk=2, learning_rate=3e-3),
        routing=RoutingConfig(min_requests=12, num_topics=2, by=("system_prompt", "topic")),
    )  # fmt: skip


def ask(llm, route, first, count=6):
    requests = [
        llm.request(f"question {n} of {route}", SAMPLING, hints=RouteHints(named=route))
        for n in range(first, first + count)
    ]
    states = llm.add(requests)
    llm.run()
    return [(state.output_token_ids, state.draft_version_at_arrival) for state in states]


def routes(llm):
    """Of the engine, which takes up what is offered between two rounds."""
    llm.engine.take_up_offered_draft()
    return llm.engine.drafting.routes


@pytest.mark.timeout(300)
def test_a_stream_gets_a_route_keeps_it_over_a_restart_and_loses_it(model_folder, tmp_path):
    state, outputs = tmp_path / "state", []
    with opened(model_folder, state) as llm:
        for n in range(0, 60, 6):
            outputs += ask(llm, "shop", n)
            ask(llm, "tools", n)
            time.sleep(0.3)
            if len(routes(llm)) > 1:
                break
        wait_for(lambda: len(routes(llm)) > 1)
        route = next(name for name in routes(llm) if name != DEFAULT_ROUTE)
        of_route = {row["id"] for row in llm.registry.versions(route)}
        assert {version for _, version in ask(llm, route, 100)} <= of_route
    with opened(model_folder, state) as llm:
        wait_for(lambda: route in routes(llm))
        of_route = {row["id"] for row in llm.registry.versions(route)}
        assert {version for _, version in ask(llm, route, 200)} <= of_route
        own = llm.registry.in_service(route).id
        rows = {row["route"]: row for row in list_routes(state)}
        assert (rows[route]["served_by"], rows[route]["version"]) == (route, own)
        close_route(state, route, "a test")
        wait_for(lambda: list(routes(llm)) == [DEFAULT_ROUTE])
        ask(llm, route, 300)
        rows = {row["route"]: row for row in list_routes(state)}
        assert rows[route]["served_by"] == DEFAULT_ROUTE
    with opened(model_folder, None, learn=False, draft="none") as plain:
        expected = [
            out.token_ids for out in plain.generate([f"question {n} of shop" for n in range(len(outputs))], SAMPLING)
        ]
    assert [token_ids for token_ids, _ in outputs] == expected


def test_topics_are_found_in_messages_and_kept(model_folder, tmp_path):
    with opened(model_folder, tmp_path / "state") as llm:
        routes = set()
        for n in range(80):
            text = f"Where is my parcel {n}?" if n % 2 else f"Sort a list of {n} integers in Python."
            routes.add(llm.request([{"role": "user", "content": text}], SAMPLING).route)
        assert routes == {DEFAULT_ROUTE, "topic-0", "topic-1"}
        system = [{"role": "system", "content": "You sell plants."}, {"role": "user", "content": "Hi"}]
        assert llm.request(system, SAMPLING).route.startswith("system-")
    assert (tmp_path / "state" / TOPICS_NAME).exists()
