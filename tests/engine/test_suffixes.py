"""Suffix proposals in the engine: what enters the traffic, who may use it, and when a suffix is worth more than the draft."""

import dataclasses

import pytest

from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.engine.drafting import Lineup
from livedraft.records import HELD_OUT_SHARE
from livedraft.speculation import draft_model as draft_model_room
from livedraft.speculation.draft_length import CostModel
from livedraft.speculation.suffix import Match, SuffixMatcher
from tests.tiny import COSTS, decoder, draft_model, engine, perturbed_draft, random_model, request, serve

MODEL = random_model()
PROMPT = [3, 7, 11, 2, 9]


def suffixed(noise=None, **options):
    target = decoder(MODEL)
    draft = None if noise is None else draft_model(perturbed_draft(MODEL, noise=noise), target)
    return engine(target, draft, suffixes=True, **{"k": None, **options})


def drafted(served, name="suffix"):
    stats = served.stats_by_version.get(("default", name))
    return stats.num_draft_tokens if stats else 0


def test_what_was_said_once_is_proposed_the_second_time():
    served = suffixed()
    first = serve(served, [request(PROMPT, 0)])
    passes = served.stats.num_target_passes
    assert serve(served, [request(PROMPT, 1)]) == first
    assert served.stats.num_target_passes - passes < 10 < passes


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, True),
        ({"store": False}, False),
        ({"conversation_key": f"{HELD_OUT_SHARE * 7:x}"}, False),
        ({"conversation_key": f"{HELD_OUT_SHARE * 7 + 1:x}"}, True),
    ],
)
def test_what_must_not_be_learnt_from_enters_no_traffic(fields, is_kept):
    served = suffixed()
    serve(served, [dataclasses.replace(request(PROMPT, 0), **fields)])
    assert (served.traffic["default"].num_tokens > 0) == is_kept


def test_a_cancelled_or_failed_request_is_not_kept_half():
    served = suffixed()
    state = served.add_request(request(PROMPT, 0))
    served.step()
    served.cancel("r0")
    assert state.finish_reason == "cancelled"
    served.step()
    assert serve(served, [request(PROMPT, 1)]) == serve(suffixed(), [request(PROMPT, 1)])


def test_deletion_forgets_all_traffic_and_what_was_offered():
    served = suffixed()
    serve(served, [request(PROMPT, 0)])
    before = served.new_traffic()
    before.add([1, 2, 3, 4])
    served.offer_texts("default", before)
    served.forget_prefixes()
    served.step()
    assert served.traffic["default"].num_tokens == 0


def test_requests_that_run_at_a_deletion_leave_nothing_behind():
    config = EngineConfig(max_num_seqs=2, max_model_len=256)
    served = engine(decoder(MODEL, num_slots=4, max_length=256), None, suffixes=True, k=None, config=config)
    prompt = PROMPT * 8
    running = served.add_request(request(prompt, 0))
    served.step()
    served.forget_prefixes()
    while served.has_work:
        served.step()
    assert running.output_token_ids
    assert all(traffic.num_tokens == 0 for traffic in served.traffic.values())
    again = served.add_request(request(prompt, 1))
    while served.has_work:
        served.step()
    assert again.num_cached_tokens == 0
    assert served.traffic["default"].num_tokens > 0  # what comes later is kept again


def test_texts_of_an_earlier_process_are_taken_over():
    served, earlier = suffixed(), suffixed()
    serve(earlier, [request(PROMPT, 0)])
    served.offer_texts("default", earlier.traffic["default"])
    serve(served, [request(PROMPT, 0)])
    assert served.stats.num_target_passes < earlier.stats.num_target_passes / 2


def test_own_text_alone_where_no_traffic_is_kept():
    target = decoder(MODEL)
    served = engine(target, None, suffixes=True, k=None)
    served.speculation = SpeculationConfig(suffix_traffic_tokens=0)
    serve(served, [request(PROMPT, 0)])
    assert served.traffic["default"].num_tokens == 0


def client(number, key, prompt=PROMPT):
    return dataclasses.replace(request(prompt, number), client_key=key)


@pytest.mark.parametrize("isolation", ["shared", "client"])
def test_isolation_keeps_texts_and_prefixes_of_clients_apart(isolation):
    prompt = [(7 * n) % 60 for n in range(40)]
    target = decoder(MODEL, num_slots=4)
    config = EngineConfig(max_num_seqs=2, max_model_len=target.max_length, isolation=isolation)
    served = engine(target, None, suffixes=True, k=None, config=config)

    def reused(number, key):
        state = served.add_request(client(number, key, prompt))
        while served.has_work:
            served.step()
        return state.num_cached_tokens, state.stats.num_target_passes

    _, alone = reused(0, "alice")
    is_shared = isolation == "shared"
    for number, key in ((1, "bob"), (2, "")):
        cached, passes = reused(number, key)
        assert (cached > 0) == is_shared
        assert (passes < alone / 2) == is_shared  # its own text helps either way
    cached, passes = reused(3, "alice")
    assert cached > 0
    assert passes < alone / 2
    cached, _ = reused(4, "")
    assert (cached > 0) == is_shared  # nobody in particular leaves nothing


def test_running_requests_of_other_clients_are_not_copied_from():
    prompt = [(7 * n) % 60 for n in range(90)]
    target = decoder(MODEL, num_slots=4)
    config = EngineConfig(max_num_seqs=4, max_model_len=target.max_length, isolation="client")
    served = engine(target, None, k=0, config=config)
    states = [served.add_request(client(number, key, prompt)) for number, key in enumerate(("a", "b", "a", ""))]
    while served.has_work:
        served.step()
    assert [state.num_cached_tokens > 0 for state in states] == [False, False, True, False]


def test_isolation_is_one_of_two():
    with pytest.raises(ValueError, match="isolation must be shared or client"):
        EngineConfig(isolation="user")
    with pytest.raises(ValueError, match="suffix_traffic_tokens"):
        SpeculationConfig(suffix_traffic_tokens=-1)
    with pytest.raises(ValueError, match="draft_model, suffix or none"):
        SpeculationConfig(method="ngram")


DEAR_ROWS = CostModel(target_seconds_by_rows={1: 0.010, 2: 0.016, 16: 0.100}, draft_seconds_by_requests={1: 0.0005})


def test_where_rows_are_dear_only_sure_matches_are_proposed():
    short = Match(length=3, continuation=tuple(range(8)), is_own=True)
    long = Match(length=50, continuation=tuple(range(8)), is_own=True)
    cheap, dear = suffixed(costs=COSTS), suffixed(costs=DEAR_ROWS)

    def length(served, match, limit, rate):
        matcher = SuffixMatcher(traffic=served.new_traffic(), client_key="", longest=8)
        return served.drafting._suffix_length(match, matcher, limit, 1, rate)

    assert length(cheap, long, 20, 1.0)[0] == 8  # a row costs nothing here
    assert length(cheap, short, 2, 1.0)[0] == 2  # what the request can still use
    assert length(dear, short, 20, 100.0) == (0, 0.0)
    k, value = length(dear, long, 20, 100.0)
    assert k >= 3
    assert 0.5 < value < 8


def test_the_draft_goes_first_where_it_is_worth_more():
    """A perfect draft that has shown it, beside short matches; and a useless one beside texts that were all said before."""
    good = suffixed(0.0, prior=0.95)
    for number in range(8):
        serve(good, [request([number, 5, 9, number, 5, 9], number, temperature=1.0, seed=number)])
    assert drafted(good, "v1") > drafted(good)
    poor = suffixed(0.5, prior=0.05)
    serve(poor, [request(PROMPT, 0)])
    before = drafted(poor, "v1")
    serve(poor, [request(PROMPT, 1)])
    assert drafted(poor) > 10
    assert drafted(poor, "v1") - before <= 2


def test_a_request_that_wants_no_proposals_gets_none():
    served = suffixed()
    serve(served, [request(PROMPT, 0)])
    before = served.stats.num_draft_tokens
    serve(served, [dataclasses.replace(request(PROMPT, 1), num_speculative_tokens=0)])
    assert served.stats.num_draft_tokens == before


def test_requests_are_counted_for_a_version_also_after_suffix_rounds():
    """The watch weighs versions by requests: one whose first proposal was a suffix counts when the draft comes to draft."""
    served = suffixed(0.04, prior=0.5)
    for number in range(12):
        serve(served, [request([*PROMPT, number % 5], number, max_tokens=40, temperature=1.0, seed=number)])
    own = served.stats_by_version["default", "v1"]
    assert 0 < own.num_requests <= 12
    states = served.stats.num_target_passes
    assert states > 12


def test_a_suffix_fills_in_where_the_draft_has_nothing_to_say():
    """A draft thought good whose cache is not worth filling for a short answer."""
    target = decoder(MODEL)
    draft = draft_model(perturbed_draft(MODEL, noise=0.0), target)
    costs = dataclasses.replace(COSTS, draft_write_seconds=10.0)
    served = engine(target, draft, k=None, prior=0.95, costs=costs, suffixes=True)
    serve(served, [request(PROMPT * 4, 0, max_tokens=20)])
    serve(served, [request(PROMPT * 4, 1, max_tokens=20)])
    assert drafted(served, "v1") == 0
    assert drafted(served) > 10


def test_versions_that_are_compared_go_before_suffixes_in_a_requests_first_rounds():
    target = decoder(MODEL)
    first, second = (draft_model(perturbed_draft(MODEL, noise=0.3), target, version=v) for v in ("one", "two"))
    served = engine(target, first, k=None, prior=0.3, suffixes=True)
    serve(served, [request(PROMPT, 0)])
    served.drafting.offer(Lineup(service=first, second=second, share=0.5))
    serve(served, [request(PROMPT, n) for n in range(1, 9)])
    assert served.stats_by_version["default", "two"].num_drafts > 0
    assert served.stats_by_version["default", "one"].num_drafts > 0


def test_a_suffix_fills_in_while_the_draft_still_reads_a_long_prompt(monkeypatch):
    """A draft that catches up answers with an empty proposal for some rounds; each of them can have the refused suffix."""
    monkeypatch.setattr(draft_model_room, "MAX_CATCH_UP", 4)
    prompt = PROMPT * 12
    target = decoder(MODEL)
    served = engine(target, draft_model(perturbed_draft(MODEL, noise=0.0), target), k=None, prior=0.99, suffixes=True)
    serve(served, [request(prompt, 0, max_tokens=12)])
    before = drafted(served)
    state = served.add_request(request(prompt, 1, max_tokens=12))
    while not state.num_output_tokens:
        served.step()
    served.drafting.service.lengths.set_prior(0.99)
    served.step()
    assert served.drafting.service.draft.lengths[state.slot] < len(state.token_ids) - 1  # it catches up still
    assert drafted(served) > before
