import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from livedraft.config import EngineConfig
from livedraft.engine.request import RequestState
from livedraft.engine.scheduler import Scheduler
from tests.tiny import PROMPTS, decoder, draft_model, engine, perturbed_draft, random_model, request, serve

MODEL = random_model()
TARGET = decoder(MODEL)
PERFECT = perturbed_draft(MODEL, noise=0.0)


def perfect_engine(**options):
    return engine(TARGET, draft_model(PERFECT, TARGET, keep_logits=True), **options)


LONG = serve(engine(TARGET, None), [request(PROMPTS[0], max_tokens=40)])[0]


@pytest.mark.parametrize("index", range(7))
def test_end_of_sequence_inside_an_accepted_block_ends_there(index):
    """With a perfect draft and k = 5 every index of the block is hit; nothing after the EOS is emitted."""
    eos = LONG[index]
    wanted = LONG[: LONG.index(eos) + 1]
    served = perfect_engine(k=5, eos_token_ids=(eos,))
    state = served.add_request(request(PROMPTS[0], max_tokens=40))
    while served.has_work:
        served.step()
    assert state.output_token_ids == wanted
    assert state.finish_reason == "stop"
    assert served.stats.num_emitted_tokens == len(wanted)


def test_ignore_eos_and_stop_token_ids():
    eos = LONG[2]
    first = LONG.index(eos)
    assert len(serve(perfect_engine(eos_token_ids=(eos,)), [request(PROMPTS[0], ignore_eos=True)])[0]) == 24
    stopped = serve(perfect_engine(), [request(PROMPTS[0], stop_token_ids=(eos,), ignore_eos=True)])[0]
    assert stopped == LONG[: first + 1]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_is_never_overshot(max_tokens):
    served = perfect_engine(k=5)
    state = served.add_request(request(PROMPTS[0], max_tokens=max_tokens))
    while served.has_work:
        served.step()
    assert state.output_token_ids == LONG[:max_tokens]
    assert state.finish_reason == "length"


def test_slots_are_reused_and_counted():
    served = perfect_engine()
    outputs = serve(served, [request(PROMPTS[i % 4], i, max_tokens=5) for i in range(11)])
    assert [len(output) for output in outputs] == [5] * 11
    assert not served.has_work
    assert served.step() == []


@pytest.mark.parametrize(
    ("token_ids", "options", "words"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 100, {"max_tokens": 100}, "limit of 128"),
        ([64], {}, "outside 0..63"),
        ([-1], {}, "outside 0..63"),
    ],
)
def test_what_cannot_be_served_is_refused_and_harms_nobody(token_ids, options, words):
    served = perfect_engine()
    good = served.add_request(request(PROMPTS[0], max_tokens=4))
    with pytest.raises(ValueError, match=words):
        served.add_request(request(token_ids, 1, **options))
    while served.has_work:
        served.step()
    assert good.output_token_ids == LONG[:4]


def test_prompt_and_output_may_fill_the_cache_to_its_end():
    served = perfect_engine(k=5)
    output = serve(served, [request([3] * 100, max_tokens=28)])[0]
    assert len(output) == 28


def test_prefill_budget_is_shared_and_decoding_goes_on():
    scheduler = Scheduler(EngineConfig(max_num_seqs=3, max_model_len=100, prefill_token_budget=5))
    states = [RequestState.from_request(request([1] * n, i)) for i, n in enumerate((4, 9, 1))]
    for arrival, state in enumerate(states):
        state.arrived_at = arrival
        scheduler.add(state)
    assert scheduler.admit() == states
    plan = scheduler.plan_round()
    assert [(e.num_pending_rows, e.is_decoding) for e in plan] == [(4, True), (1, False), (1, True)]


def test_first_round_uses_the_draft_already():
    """The prompt is written by both models in the round that emits the first tokens."""
    served = perfect_engine(k=3)
    state = served.add_request(request(PROMPTS[1], max_tokens=8))
    served.step()
    assert state.num_output_tokens == 4


def test_probing_finds_a_draft_that_became_good():
    """A hopeless prior stops drafting; a probe sees that the draft is perfect, and drafting comes back by itself."""
    served = perfect_engine(k=None)
    served.drafting.service.lengths.set_prior(0.0)
    assert served.drafting.service.lengths.best(1) == 0
    for number in range(60):
        serve(served, [request(PROMPTS[0], number, max_tokens=20)])
        if served.drafting.service.lengths.best(1) > 0:
            break
    assert served.drafting.service.lengths.best(1) > 0


def test_trace_records_every_position_and_every_drafted_token():
    traces = []
    served = engine(
        TARGET,
        draft_model(perturbed_draft(MODEL, noise=0.2), TARGET, keep_logits=True),
        k=3,
        trace_sink=traces.append,
        target_fingerprint="f",
    )
    output = serve(served, [request(PROMPTS[1], max_tokens=20)])[0]
    (trace,) = traces
    assert trace.output_token_ids == output
    assert trace.target_fingerprint == "f"
    # Greedy: the target's likeliest token at position i is the output at i. Off by one, this fails.
    assert trace.teacher_token_ids_TK[:, 0].tolist() == output
    assert trace.teacher_token_ids_TK.shape == (20, 64)
    assert abs(trace.tail_mass_T).max() < 1e-3  # the whole tiny vocabulary is in the top 64
    for row in range(len(trace.drafted_position_P)):
        position, token = trace.drafted_position_P[row], trace.drafted_token_id_P[row]
        assert position < 20  # trimmed where the output ends
        if trace.drafted_off_path_P[row]:
            continue
        assert trace.drafted_accepted_P[row] == (output[position] == token)
        column = trace.teacher_token_ids_TK[position].tolist().index(token)
        assert abs(trace.teacher_log_probs_TK[position, column] - trace.drafted_target_log_prob_P[row]) < 0.02
        assert trace.draft_top_token_ids_PQ[row, 0] == token  # greedy drafts draw their likeliest
        assert abs(trace.draft_top_log_probs_PQ[row, 0] - trace.drafted_log_prob_P[row]) < 0.02
    assert trace.drafted_off_path_P.any()
    assert trace.drafted_accepted_P.any()
    assert sorted(set(trace.position_version_T)) in (["v1"], ["none", "v1"])  # the last round may have had no room


def test_store_false_leaves_no_trace():
    traces = []
    served = engine(TARGET, None, trace_sink=traces.append)
    from dataclasses import replace

    serve(served, [replace(request(PROMPTS[0]), store=False)])
    assert traces == []


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_any_schedule_gives_each_request_what_it_gets_alone(schedule, num_slots, budget):
    """Random prompts, lengths, gaps between arrivals, slots and budgets."""
    config = EngineConfig(max_num_seqs=num_slots, max_model_len=128, prefill_token_budget=budget)
    served = engine(TARGET, draft_model(perturbed_draft(MODEL, noise=0.1), TARGET), config=config, k=None)
    states = []
    for number, (length, max_tokens, gap) in enumerate(schedule):
        prompt = [(7 * number + 3 * i) % 64 for i in range(length)]
        states.append(served.add_request(request(prompt, number, max_tokens=max_tokens)))
        for _ in range(gap):
            served.step()
    while served.has_work:
        served.step()
    alone = engine(TARGET, None)
    for state in states:
        again = serve(
            alone, [request(list(state.request.prompt_token_ids), max_tokens=state.request.sampling.max_tokens)]
        )
        assert state.output_token_ids == again[0]


def test_batched_greedy_verdicts_equal_the_slow_twin(monkeypatch):
    """A greedy round takes one argmax for all rows; judging each request by `verify` gives the same."""
    from livedraft.speculation.verify import verify

    served = engine(TARGET, draft_model(perturbed_draft(MODEL, noise=0.04), TARGET), k=4)
    fast, compared = served._verdicts, []

    def both(entries, proposals, target_logits):
        verdicts = fast(entries, proposals, target_logits)
        for entry, proposal, logits, verdict in zip(entries, proposals, target_logits, verdicts):
            if verdict is not None:
                slow = verify(logits, proposal, entry.state.request.sampling, 0, 0)
                assert slow == verdict
                compared.append(verdict.num_accepted)
        return verdicts

    monkeypatch.setattr(served, "_verdicts", both)
    serve(served, [request(p, i) for i, p in enumerate(PROMPTS)])
    assert len(set(compared)) >= 3
