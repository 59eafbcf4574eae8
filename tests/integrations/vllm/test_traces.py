import numpy as np

from livedraft.integrations.vllm.traces import Known, KnownRequests, num_served, to_traces
from livedraft.learning.batches import example_from_trace
from tests.integrations.vllm.tapped import SAMPLING, tapped

ID = "livedraft-" + "0" * 32


def known(**fields) -> Known:
    return Known(**{"route": "default", "conversation_key": "aa", "client_key": "cc", "arrived_at": 1e10, **fields})


def test_a_trace_joins_what_both_sides_know():
    requests = KnownRequests()
    requests.add(ID, known())
    (trace,) = to_traces([tapped()], requests, "target")
    assert trace.prompt_token_ids == [1, 2] and trace.output_token_ids == [4, 5, 6]
    assert (trace.route, trace.conversation_key, trace.client_key) == ("default", "aa", "cc")
    assert (trace.target_fingerprint, trace.draft_version) == ("target", "v1")
    assert trace.sampling.is_greedy and trace.sampling.stop_token_ids == (9,)
    assert trace.position_version_T == ["none", "v1", "v1"]
    # Position 3 was drafted for and never came about.
    assert trace.drafted_position_P.tolist() == [1, 2] and trace.drafted_accepted_P.tolist() == [True, False]
    assert len(trace.draft_top_token_ids_PQ) == 2
    assert example_from_trace(trace, 1, "rejected").loss_mask_T.tolist() == [False, False, True]


def test_requests_of_strangers_and_private_ones_make_no_trace():
    requests = KnownRequests()
    requests.add(ID, known())
    strangers = [tapped("cmpl-" + "1" * 32), tapped("livedraftprivate-" + "0" * 32), tapped("livedraft-" + "1" * 32)]
    assert to_traces(strangers, requests, "target") == []


def test_several_choices_of_one_request_are_told_apart():
    requests = KnownRequests()
    requests.add(ID, known())
    traces = to_traces([tapped(f"{n}_chatcmpl-{ID}-{n}") for n in range(2)], requests, "target")
    assert len({trace.request_id for trace in traces}) == 2


def test_what_a_round_verified_past_the_end_is_cut_off():
    assert num_served(tapped(output=(4, 9, 6))) == 2
    assert num_served(tapped(output=(4, 5, 6), sampling={**SAMPLING, "max_tokens": 2})) == 2
    requests = KnownRequests()
    requests.add(ID, known())
    (trace,) = to_traces([tapped(output=(4, 9, 6))], requests, "target")
    assert trace.output_token_ids == [4, 9]
    assert len(trace.teacher_token_ids_TK) == len(trace.tail_mass_T) == len(trace.position_version_T) == 2
    assert trace.drafted_position_P.tolist() == [1]
    assert np.all(trace.round_number_T == [0, 1])


def test_vllms_ways_to_say_off_are_understood():
    requests = KnownRequests()
    requests.add(ID, known())
    strange = {**SAMPLING, "top_k": -1, "seed": -1, "max_tokens": None}
    (trace,) = to_traces([tapped(sampling={**strange, "max_tokens": None})], requests, "target")
    assert trace.sampling.top_k == 0 and trace.sampling.seed is None


def test_requests_whose_trace_never_comes_are_forgotten():
    requests = KnownRequests()
    requests.add(ID, known(arrived_at=0.0))
    requests.add("livedraft-" + "1" * 32, known())
    assert requests.of(ID) is None
