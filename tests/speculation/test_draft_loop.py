"""Whole loops against drafting step by step: the same tokens, rows, probabilities and logits, and caches in the same state."""

import random
from dataclasses import replace

import pytest
import torch

from livedraft.drafts.weights import DraftWeights, draft_from_model
from livedraft.models.static_decoder import UNKNOWN
from livedraft.records import SamplingParams
from livedraft.sampling import draw, draw_rows
from livedraft.speculation import draft_loop as room
from livedraft.speculation.draft_loop import DraftSlots
from livedraft.speculation.prefix import PrefixState
from livedraft.speculation.proposer import ProposalTask
from tests.tiny import (
    VOCABULARY_SIZE,
    decoder,
    draft_model,
    looped_draft,
    perturbed_draft,
    random_model,
    request,
    static_decoder,
)

MODEL = random_model()
WEIGHTS = perturbed_draft(MODEL, noise=0.3)
MODES = [{}, {"temperature": 0.8, "seed": 17}, {"temperature": 1.3}]


def trimmed(weights: DraftWeights, step: int) -> DraftWeights:
    rows = torch.arange(1, VOCABULARY_SIZE, step)
    tensors = {**weights.tensors, "head": weights.tensors["head"][rows]}
    return DraftWeights(tensors=tensors, draft_to_target_W=weights.draft_to_target_W[rows])


def pair(weights, slots=None, **sizes):
    target = static_decoder(MODEL, **sizes)
    looped = looped_draft(weights, target, slots, keep_logits=True)
    poison(looped)
    return looped, draft_model(weights, decoder(MODEL, **sizes), keep_logits=True)


def poison(looped):
    loop = looped._loop
    loop.decoder.cache._storage[:, :, :, :, loop.decoder.max_length :] = torch.nan
    for buffer in (loop.noise_kBC[:, :, : len(loop.draft_to_target_W)], loop.logits_kBC, loop.probs_kBC):
        buffer.fill_(torch.nan)


def task(token_ids, k, slot=0, own_seed=5, **sampling):
    return ProposalTask(
        slot=slot,
        token_ids=token_ids,
        num_prompt_tokens=2,
        sampling=SamplingParams(**sampling),
        seed=own_seed,
        num_tokens=k,
    )


def assert_same(proposals, expected):
    for got, wanted in zip(proposals, expected, strict=True):
        assert (got.draft_token_ids, got.draft_row_ids) == (wanted.draft_token_ids, wanted.draft_row_ids)
        for name in ("draft_probs_KW", "draft_logits_KW"):
            ours, theirs = getattr(got, name), getattr(wanted, name)
            assert (ours is None) == (theirs is None)
            # In float32, of logits up to ten, batches of other shapes part by 1.5e-4 on some CPUs; tokens must be equal.
            assert ours is None or (ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=3e-4))


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_rounds_equal_drafting_step_by_step(seed, step):
    """Requests of every mode come, go and are rewound by any number of tokens; some rounds draft nothing for some."""
    chance = random.Random(seed)
    looped, stepwise = pair(trimmed(WEIGHTS, step) if step else WEIGHTS)
    texts, modes, num_drafted = [[] for _ in range(4)], [{}] * 4, 0
    for _ in range(40):
        for slot in range(4):
            if len(texts[slot]) > 100 or not texts[slot] or chance.random() < 0.05:
                texts[slot] = [chance.randrange(VOCABULARY_SIZE) for _ in range(chance.choice([2, 3, 30]))]
                modes[slot] = chance.choice(MODES)
                for one in (looped, stepwise):
                    one.release(slot)
        drafting = [slot for slot in range(4) if chance.random() < 0.7]
        tasks = [task(texts[s], chance.choice([1, 2, 3, 5, 7, 8]), slot=s, own_seed=s, **modes[s]) for s in drafting]
        proposals = looped.propose(tasks)
        assert_same(proposals, stepwise.propose(tasks))
        assert looped.lengths == stepwise.lengths
        assert looped.num_rows == stepwise.num_rows
        for slot, proposal in zip(drafting, proposals):
            drafted = proposal.draft_token_ids
            num_drafted += len(drafted)
            accepted = drafted[: chance.choice([0, 1, len(drafted)])]
            texts[slot] = [*texts[slot], *accepted, chance.randrange(VOCABULARY_SIZE)]
        for slot in range(4):
            if slot not in drafting:
                texts[slot] = [*texts[slot], *([9, 4] * chance.choice([0, 1, 4]))]
            for one in (looped, stepwise):
                one.commit(slot, len(texts[slot]) - 1)
    assert num_drafted > 100


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("length", [60, 61, 62, 63, 64])
def test_up_to_the_last_position_of_the_cache(length, k):
    """The others' longer loops write past it, into scratch."""
    looped, stepwise = pair(WEIGHTS, max_length=64)
    k = min(k, 64 - length + 1)
    text = [(5 * i) % VOCABULARY_SIZE for i in range(length)]
    tasks = [task(text, k), task([3, 9], 8, slot=1)]
    assert_same(looped.propose(tasks), stepwise.propose(tasks))
    for one in (looped, stepwise):
        one.commit(0, length - 1)
    assert_same(looped.propose([task(text, k)]), stepwise.propose([task(text, k)]))


@pytest.mark.parametrize("slot", range(5))
def test_slots_of_nobody_do_not_matter(slot):
    looped, stepwise = pair(WEIGHTS, num_slots=5)
    others = [other for other in range(5) if other != slot]
    looped._loop.decoder.cache._storage[:, :, others] = torch.nan
    for mode in MODES:
        one = task([3, 9, 27, 17, 51], 5, slot=slot, **mode)
        assert_same(looped.propose([one]), stepwise.propose([one]))


def test_tokens_stay_on_the_device_until_they_are_asked_for():
    looped, stepwise = pair(WEIGHTS)
    tasks = [task([3, 9, 27], 4, slot=2), task([4, 9], 2, slot=0, temperature=1.0)]
    proposals = looped.propose_ahead(tasks)
    assert [one.draft_token_ids for one in proposals] == [[UNKNOWN] * 4, [UNKNOWN] * 2]
    expected = stepwise.propose(tasks)
    proposed = looped._target.proposed_Bn
    assert proposed[2, 1:5].tolist() == expected[0].draft_token_ids
    assert proposed[0, 1:3].tolist() == expected[1].draft_token_ids
    for one in proposals:
        one.settle()
    assert_same(proposals, expected)


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
@pytest.mark.parametrize("seed", [None, 3])
def test_requests_with_filters_draft_step_by_step_beside_others(sampling, seed):
    looped, stepwise = pair(WEIGHTS)
    tasks = [
        task([3, 9, 27], 4, **{"temperature": 1.1, "seed": seed, **sampling}),
        task([4, 9, 1], 4, slot=1),
        task([8, 9, 1], 3, slot=2, **sampling),  # greedy: filters do nothing
    ]
    assert_same(looped.propose(tasks), stepwise.propose(tasks))


def test_a_request_with_penalties_drafts_step_by_step():
    looped, stepwise = pair(WEIGHTS)
    one = request([3, 9, 27], presence_penalty=1.0)
    prefix = PrefixState.of(one, VOCABULARY_SIZE, torch.device("cpu"))
    tasks = [replace(task([3, 9, 27], 4), prefix=prefix, sampling=one.sampling), task([4, 9, 1], 4, slot=1)]
    assert_same(looped.propose(tasks), stepwise.propose(tasks))


def test_longer_proposals_than_a_loop_has_steps():
    looped, stepwise = pair(WEIGHTS)
    assert_same(looped.propose([task([3, 9], 12)]), stepwise.propose([task([3, 9], 12)]))


def test_catching_up_keeps_to_its_budget(monkeypatch):
    monkeypatch.setattr(room, "MAX_CATCH_UP", 10)
    looped, _ = pair(WEIGHTS)
    text = [(3 * i) % VOCABULARY_SIZE for i in range(25)]
    rounds = [len(looped.propose([task(text, 2)])[0].draft_token_ids) for _ in range(3)]
    assert rounds == [0, 0, 2]
    expected = draft_model(WEIGHTS, decoder(MODEL)).propose([task(text, 2)])[0]
    looped.commit(0, 24)
    assert looped.propose([task(text, 2)])[0].draft_token_ids == expected.draft_token_ids


# --- slots ----------------------------------------------------------------------------------------------------------


def test_a_new_version_is_copied_into_a_slot_nobody_holds():
    target = static_decoder(MODEL)
    slots = DraftSlots(target)
    first = looped_draft(WEIGHTS, target, slots)
    slots.reserve(1)
    assert slots.num_slots == 2
    second = looped_draft(trimmed(perturbed_draft(MODEL, noise=0.6), 2), target, slots, version="v2")
    assert slots.num_slots == 2
    addresses = [tensor.data_ptr() for tensor in room.weight_tensors(first._loop.decoder.weights)]
    loop = first._loop
    first.propose([task([3, 9, 27], 3)])
    del first
    third_weights = perturbed_draft(MODEL, noise=0.9, num_tokens=40)
    third = looped_draft(third_weights, target, slots, version="v3")
    assert third._loop is loop
    assert [tensor.data_ptr() for tensor in room.weight_tensors(loop.decoder.weights)] == addresses
    for draft, weights in ((second, trimmed(perturbed_draft(MODEL, noise=0.6), 2)), (third, third_weights)):
        expected = draft_model(weights, decoder(MODEL)).propose([task([3, 9, 27, 1], 5)])
        got = draft.propose([task([3, 9, 27, 1], 5)])
        assert got[0].draft_token_ids == expected[0].draft_token_ids


def test_a_draft_of_another_shape_gets_a_slot_of_its_own():
    target = static_decoder(MODEL)
    slots = DraftSlots(target)
    looped_draft(WEIGHTS, target, slots)
    shallow = {n: t for n, t in WEIGHTS.tensors.items() if not n.startswith("layers.2.")}
    weights = DraftWeights(tensors=shallow, draft_to_target_W=WEIGHTS.draft_to_target_W)
    draft = looped_draft(weights, target, slots)
    assert slots.num_slots == 2
    assert_same(draft.propose([task([3, 9], 4)]), draft_model(weights, decoder(MODEL)).propose([task([3, 9], 4)]))


def test_a_whole_model_keeps_its_own_embedding():
    """Beside the target's: a slot for layers of the target is none for it."""
    target = static_decoder(MODEL)
    slots = DraftSlots(target)
    looped_draft(WEIGHTS, target, slots)
    for seed in (5, 6):
        weights = draft_from_model(random_model(seed=seed), VOCABULARY_SIZE)
        draft = looped_draft(weights, target, slots)
        assert_same(draft.propose([task([3, 9], 4)]), draft_model(weights, decoder(MODEL)).propose([task([3, 9], 4)]))
        assert slots.num_slots == 2
        del draft


def test_the_weights_given_are_not_the_slots_own():
    target = static_decoder(MODEL)
    weights = perturbed_draft(MODEL, noise=0.1)
    slots = DraftSlots(target)
    draft = looped_draft(weights, target, slots)
    kept = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    embedding = target.weights.embedding_VD.clone()
    del draft
    looped_draft(WEIGHTS, target, slots)
    assert slots.num_slots == 1
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in kept.items())
    assert torch.equal(target.weights.embedding_VD, embedding)


def test_rows_are_drawn_as_one_is():
    torch.manual_seed(0)
    probs = torch.rand(200, 30)
    probs[torch.rand(200, 30) < 0.5] = 0.0
    probs[:, 7] += 0.1
    probs[:50, 8:] = 0.0
    chances = torch.rand(200, dtype=torch.float64)
    chances[::5] = 1.0 - 2**-53
    chances[1::5] = 0.0
    expected = [draw(row, u) for row, u in zip(probs, chances.tolist())]
    assert draw_rows(probs, chances).tolist() == expected
