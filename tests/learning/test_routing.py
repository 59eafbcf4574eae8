"""Who gets a draft of its own, and whose draft serves whom: on numbers, without a model."""

import random

from livedraft.config import RoutingConfig
from livedraft.learning.routing import LEAST_SCORED, YOUNG_REQUESTS, Routing
from livedraft.learning.store import Streams
from livedraft.records import DEFAULT_ROUTE


def routing(**settings):
    return Routing(RoutingConfig(**{"min_requests": 10, "max_drafts": 2, **settings}))


def see(one, stream, count, alphas=None, *, noise=0.0, seed=0):
    """`count` requests of a stream, each scored under the given drafts with some noise of its own."""
    chance = random.Random(seed)
    for _ in range(count):
        own = chance.gauss(0, noise)
        one.see(stream, alphas and {route: alpha + own for route, alpha in alphas.items()})


def settle(one):
    """All changes, until there are none."""
    done = []
    while changes := one.changes():
        for change in changes:
            one.apply(change)
            done.append((change.kind, change.stream, change.route))
    return done


def test_the_largest_stream_that_shares_a_draft_gets_its_own():
    one = routing(max_drafts=1)
    see(one, "a", 12)
    see(one, "b", 30)
    assert settle(one) == [("open", "b", DEFAULT_ROUTE)]
    assert one.route_of("b") == "b" and one.route_of("a") == DEFAULT_ROUTE
    assert one.streams_of("b") == Streams(names=("b",), are_left_out=False)
    assert one.streams_of(DEFAULT_ROUTE) == Streams(names=("b",))


def test_a_stream_alone_gets_none_and_a_small_one_waits():
    one = routing()
    see(one, "a", 500)
    see(one, "b", 9)
    assert settle(one) == []
    for _ in range(30):  # of no stream: others for "a", and never a route of its own
        see(one, "a", 1)
        see(one, "default", 1)
    assert settle(one) == [("open", "a", DEFAULT_ROUTE)]


def test_a_stream_goes_to_the_draft_that_is_better_on_its_requests_beyond_chance():
    one = routing(max_drafts=1)
    see(one, "a", 40)
    see(one, "b", 20)
    settle(one)
    see(one, "a", YOUNG_REQUESTS)
    see(one, "b", LEAST_SCORED - 1, {DEFAULT_ROUTE: 0.30, "a": 0.35}, noise=0.1)
    assert settle(one) == []
    see(one, "b", 1, {DEFAULT_ROUTE: 0.30, "a": 0.35})
    assert settle(one) == [("assign", "b", "a")]
    assert one.streams_of("a") == Streams(names=("a", "b"), are_left_out=False)


def test_noise_moves_no_stream_and_closes_no_route():
    streams = ["a", "b", "c", "d", "e"]
    one = routing(max_drafts=5)
    for stream in streams:
        see(one, stream, 40)
        see(one, "default", 40)
        settle(one)
    assert one.open == streams
    chance = random.Random(1)
    moves = []
    for _ in range(200):
        for stream in streams:
            own = chance.gauss(0.3, 0.1)  # of the request; the drafts are all as good
            one.see(stream, {route: own + chance.gauss(0.0, 0.03) for route in (DEFAULT_ROUTE, *one.open)})
            moves += settle(one)
    assert len(moves) <= 4  # in a thousand looks


def test_a_new_copy_is_not_judged_and_gets_no_other_stream_until_it_has_served():
    one = routing(max_drafts=2)
    for stream in ("a", "b"):
        see(one, stream, 40)
        see(one, "default", 40)
        settle(one)
    assert one.open == ["a", "b"]
    see(one, "b", YOUNG_REQUESTS - 1, {DEFAULT_ROUTE: 0.5, "a": 0.6, "b": 0.3})
    assert settle(one) == []
    see(one, "a", YOUNG_REQUESTS - 1)
    see(one, "b", 1 + LEAST_SCORED, {DEFAULT_ROUTE: 0.5, "a": 0.6, "b": 0.3})
    assert settle(one) == []  # seen once
    see(one, "b", LEAST_SCORED, {DEFAULT_ROUTE: 0.5, "a": 0.6, "b": 0.3})
    assert settle(one)[0] == ("assign", "b", DEFAULT_ROUTE)  # not "a", which is as young
    assert settle(one) == []


def test_a_lead_too_small_to_matter_moves_nothing_however_sure():
    one = routing(max_drafts=1)
    see(one, "a", 40)
    see(one, "b", 20)
    settle(one)
    see(one, "a", YOUNG_REQUESTS)
    see(one, "b", 60, {DEFAULT_ROUTE: 0.30, "a": 0.305})
    assert settle(one) == []


def test_a_new_draft_is_a_copy_of_the_one_that_does_best_on_its_stream():
    one = routing(max_drafts=1)
    see(one, "a", 40)
    see(one, "b", 20)
    settle(one)
    see(one, "b", 20, {DEFAULT_ROUTE: 0.3, "a": 0.4})  # "a" is too young to be given "b"
    see(one, "default", 40)
    one.config = RoutingConfig(min_requests=10, max_drafts=2)
    assert settle(one) == [("open", "b", "a")]


def test_a_route_whose_own_stream_is_better_served_elsewhere_closes_and_waits_longer():
    one = routing(max_drafts=1)
    see(one, "a", 40)
    see(one, "b", 30)
    settle(one)
    see(one, "a", YOUNG_REQUESTS, {DEFAULT_ROUTE: 0.40, "a": 0.30})
    assert settle(one) == []  # a second look is wanted
    see(one, "a", LEAST_SCORED, {DEFAULT_ROUTE: 0.40, "a": 0.30})
    see(one, "b", 15)
    kinds = settle(one)
    assert kinds[:2] == [("assign", "a", DEFAULT_ROUTE), ("close", "a", "a")]
    assert kinds[2:] == [("open", "b", DEFAULT_ROUTE)]  # its place is free
    see(one, "a", 15)
    one.config = RoutingConfig(min_requests=10, max_drafts=2)
    assert settle(one) == []
    see(one, "a", 15)
    see(one, DEFAULT_ROUTE, 40)
    assert settle(one) == [("open", "a", DEFAULT_ROUTE)]


def test_an_idle_route_gives_its_place_up(monkeypatch):
    one = routing(max_drafts=1, idle_days=1.0)
    see(one, "a", 40)
    see(one, "b", 20)
    settle(one)
    assert one.open == ["a"]
    monkeypatch.setattr("livedraft.learning.routing.time.time", lambda: one._seen_at["a"] + 2 * 86400)
    see(one, "b", 1)
    see(one, "c", 9)
    assert ("close", "a", "a") in settle(one)


def test_what_was_found_survives_a_restart_as_far_as_the_drafts_do():
    one = routing()
    see(one, "a", 40)
    see(one, "b", 30)
    settle(one)
    assert one.open == ["a", "b"] or one.open == ["a"]
    again = routing()
    again.restore(one.state(), [DEFAULT_ROUTE, "a"])
    assert again.open == ["a"] and again.route_of("a") == "a" and again.route_of("b") == DEFAULT_ROUTE
    fresh = routing()
    fresh.restore({}, [DEFAULT_ROUTE, "x"])  # opened, and the process ended before it could say so
    assert fresh.route_of("x") == "x"
