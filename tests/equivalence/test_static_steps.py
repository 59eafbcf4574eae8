"""The engine on padded, replayed steps: token for token what it says on the plain ones, whatever the batch, k, context, swaps,
slots used again and prefixes copied. Recording is `EagerReplay`'s, as it is wherever there is no GPU."""

import pytest
import torch

from livedraft.config import EngineConfig
from livedraft.records import Request, SamplingParams
from livedraft.speculation.draft_loop import DraftSlots
from tests.tiny import (
    PROMPTS,
    decoder,
    draft_model,
    engine,
    looped_draft,
    perturbed_draft,
    random_model,
    request,
    serve,
    static_decoder,
)

MODEL = random_model()
SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 17},
    "seeded top_p": {"temperature": 1.2, "seed": 3, "top_p": 0.8, "top_k": 20},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.2},
}


def static_engine(noise=0.04, *, num_slots=4, max_length=128, keep_logits=False, **options):
    """Everything nobody may read holds NaN."""
    target = static_decoder(MODEL, num_slots=num_slots, max_length=max_length)
    draft = None
    if noise is not None:
        draft = looped_draft(perturbed_draft(MODEL, noise=noise), target, keep_logits=keep_logits)
    for one in [target, *([draft.decoder] if draft else [])]:
        one.cache._storage[:, :, :, :, one.max_length :] = torch.nan
        one._logits_NV.fill_(torch.nan)
    return engine(target, draft, **options)


def plain(prompts, **sampling):
    target = decoder(MODEL, num_slots=8)
    return serve(engine(target, None), [request(p, i, **sampling) for i, p in enumerate(prompts)])


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [0, 1, 3, 5, 8, 10, None])
@pytest.mark.parametrize("mode", SAMPLING)
def test_equals_plain_decoding_token_for_token(mode, k, batch):
    served = static_engine(k=k)
    outputs = serve(served, [request(p, i, **SAMPLING[mode]) for i, p in enumerate(PROMPTS[:batch])])
    assert outputs == plain(PROMPTS[:batch], **SAMPLING[mode])
    if k != 0:
        assert served.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_across_the_borders_of_contexts(mode):
    """From 100 to 300 positions with a border at 128 and 256, the last position of the cache among them."""
    served = static_engine(num_slots=2, max_length=300, config=EngineConfig(max_num_seqs=2, max_model_len=300))
    prompts = [[(7 * i) % 60 for i in range(n)] for n in (100, 30)]
    lengths = [200, 250]
    outputs = serve(
        served, [request(p, i, max_tokens=n, **SAMPLING[mode]) for i, (p, n) in enumerate(zip(prompts, lengths))]
    )
    wide = EngineConfig(max_num_seqs=2, max_model_len=300)
    for prompt, n, output in zip(prompts, lengths, outputs):
        alone = engine(decoder(MODEL, num_slots=2, max_length=300), None, config=wide)
        assert output == serve(alone, [request(prompt, max_tokens=n, **SAMPLING[mode])])[0]
        assert len(output) == n


@pytest.mark.parametrize("mode", SAMPLING)
def test_swaps_into_slots_used_before(mode):
    """Eight versions through three slots while requests run."""
    target = static_decoder(MODEL)
    slots = DraftSlots(target)
    served = engine(target, looped_draft(perturbed_draft(MODEL, noise=0.1), target, slots, version="0"))
    slots.reserve(2)
    states = [served.add_request(request(p, i, max_tokens=60, **SAMPLING[mode])) for i, p in enumerate(PROMPTS)]
    versions, rounds = set(), 0
    while served.has_work:
        rounds += 1
        if rounds % 2 == 0 and rounds <= 16:
            weights = perturbed_draft(MODEL, noise=(0.0, 0.1, 0.6)[rounds % 3])
            served.offer_draft(looped_draft(weights, target, slots, version=str(rounds)))
        served.step()
        versions.add(served.draft_version)
    assert [state.output_token_ids for state in states] == plain(PROMPTS, max_tokens=60, **SAMPLING[mode])
    assert len(versions) >= 6
    assert slots.num_slots == 3


def test_requests_that_join_and_leave_and_begin_alike():
    """Nine requests over two slots and two more that keep beginnings, chunked prefill of three tokens a round."""
    beginning = [(7 * i) % 60 for i in range(40)]
    prompts = [[*beginning, i, 7] if i % 2 else [*PROMPTS[i % 4], i] for i in range(9)]
    lengths = [3, 20, 1, 9, 14, 2, 6, 30, 5]
    config = EngineConfig(max_num_seqs=2, max_model_len=128, prefill_token_budget=3)
    served = static_engine(0.1, config=config)
    outputs = serve(served, [request(p, i, max_tokens=n) for i, (p, n) in enumerate(zip(prompts, lengths))])
    assert outputs == [plain([p], max_tokens=n)[0] for p, n in zip(prompts, lengths)]
    assert served.prefixes.num_hit_tokens > 0


@pytest.mark.parametrize("mode", SAMPLING)
def test_suffixes_beside_the_draft(mode):
    served = static_engine(0.3, k=5, suffixes=True)
    for attempt in range(3):
        prompts = [[*p, *p, 3] for p in PROMPTS]
        sampling = {"max_tokens": 40, **SAMPLING[mode]}
        outputs = serve(served, [request(p, 10 * attempt + i, **sampling) for i, p in enumerate(prompts)])
        assert outputs == plain(prompts, **sampling)
    assert served.stats_by_version["default", "suffix"].num_accepted_tokens > 0
    assert served.stats_by_version["default", "v1"].num_accepted_tokens > 0


def test_a_spoiled_request_does_not_spoil_the_next_in_its_slot():
    served = static_engine(0.04)
    spoiled = served.add_request(request([1] * 40, 0, max_tokens=60))
    other = served.add_request(request(PROMPTS[0], 1, max_tokens=8))
    for _ in range(3):
        served.step()
    served.runner.target.cache._storage[:, :, spoiled.slot, :, 20:60] = torch.nan
    while served.has_work:
        served.step()
    assert spoiled.finish_reason == "error"
    assert other.output_token_ids == plain([PROMPTS[0]], max_tokens=8)[0]
    assert serve(served, [request(PROMPTS[1], 2), request([1] * 40, 3)]) == plain([PROMPTS[1], [1] * 40])


def test_traces_are_those_of_the_plain_steps():
    """Every array, with a request that ends inside a round and an unseeded one among them."""
    collected = {}
    for name, make in (("plain", decoder), ("static", static_decoder)):
        target, traces = make(MODEL), []
        weights = perturbed_draft(MODEL, noise=0.1)
        lend = draft_model if name == "plain" else looped_draft
        served = engine(target, lend(weights, target, keep_logits=True), trace_sink=traces.append)
        modes = [{"max_tokens": 22}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.0}, {}]
        requests = [request(p, i, **m) for i, (p, m) in enumerate(zip(PROMPTS, modes))]
        states = [served.add_request(one) for one in requests]
        for index, state in enumerate(states):
            state.seed = 1000 + index  # the unseeded one would draw its own
        while served.has_work:
            served.step()
        collected[name] = {trace.request_id: trace for trace in traces}
    assert set(collected["plain"]) == {"r0", "r1", "r2", "r3"}
    for key, expected in collected["plain"].items():
        got = collected["static"][key]
        assert got.output_token_ids == expected.output_token_ids
        for name, value in vars(expected).items():
            if hasattr(value, "dtype"):
                ours = getattr(got, name)
                assert ours.dtype == value.dtype and ours.shape == value.shape, name
                assert torch.allclose(torch.tensor(ours).float(), torch.tensor(value).float(), atol=2e-2), name


def test_a_greedy_round_waits_for_the_device_once(monkeypatch):
    """Drafting, checking and choosing for four requests: what would make the host wait on a GPU is one reading of all."""
    monkeypatch.setattr("livedraft.models.top_tokens.kernels", lambda: None)  # they are a CPU's
    served = static_engine(0.04, k=4)
    for i, p in enumerate(PROMPTS):
        served.add_request(request(p, i, max_tokens=40))
    for _ in range(3):
        served.step()
    waits = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "numpy"):
        right = getattr(torch.Tensor, name)

        def counted(tensor, *rest, right=right, name=name):
            waits.append((name, tuple(tensor.shape)))
            return right(tensor, *rest)

        monkeypatch.setattr(torch.Tensor, name, counted)
    served.step()
    # The second is the drafted tokens' host copy, asked for after the first has waited for all before it.
    assert [name for name, _ in waits] == ["tolist", "tolist"]
    assert waits[1][1] == (4 * 4,)


def test_reading_together_what_was_drawn_changes_nothing():
    """Unseeded requests beside others, with seeds of the engine's own held fixed."""
    outputs = []
    for reads_together in (False, True):
        served = static_engine(0.1, k=4)
        served.reads_together = reads_together
        modes = [
            {"temperature": 1.0},
            {"temperature": 0.7, "top_k": 9},
            {"temperature": 1.0, "presence_penalty": 1.0},
            {},
        ]
        states = [served.add_request(request(p, i, **m)) for i, (p, m) in enumerate(zip(PROMPTS, modes))]
        for index, state in enumerate(states):
            state.seed = 50 + index
        while served.has_work:
            served.step()
        outputs.append([state.output_token_ids for state in states])
        assert served.stats.num_accepted_tokens > 0
    assert outputs[0] == outputs[1]


def test_costs_are_measured_on_shapes_a_round_has():
    served = static_engine(0.1, costs=None, k=None)
    costs = served.costs
    assert set(costs.target_seconds_by_rows) == {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32}
    assert set(costs.draft_seconds_by_requests) == {1, 2, 4}
    assert serve(
        served, [Request(id="a", prompt_token_ids=(5, 9, 3), sampling=SamplingParams(max_tokens=24))]
    ) == plain([PROMPTS[0]])
