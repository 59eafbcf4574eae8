"""The padded steps against the plain decoder, on every side of every border of the ladder. Recording is `EagerReplay`'s."""

import random

import pytest
import torch

from livedraft.models.decoder import attend_by_sdpa
from livedraft.models.static_decoder import (
    MAX_DRAFTED,
    ROWS_EACH,
    UNKNOWN,
    attend_by_flex,
    attend_by_matmul,
)
from tests.tiny import FAMILIES, VOCABULARY_SIZE, decoder, random_model, static_decoder

MODEL = random_model()


def step(model_decoder, parts, asked=None):
    """parts: (slot, first position, tokens)."""
    rows = [(token, first + i, slot) for slot, first, tokens in parts for i, token in enumerate(tokens)]
    asked = list(range(len(rows))) if asked is None else asked
    return model_decoder.forward(*map(list, zip(*rows)), asked).logits_RV


def poison(static):
    """Whatever no request may see."""
    storage = static.cache._storage
    storage[:, :, :, :, static.max_length :] = torch.nan
    static._logits_NV.fill_(torch.nan)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_rounds_equal_the_plain_decoder(name):
    """Prompts, chunks, one to eleven rows each, rewinds, slots that leave and come back, prefixes copied."""
    model, chance = random_model(FAMILIES[name]), random.Random(name)
    static, plain = static_decoder(model), decoder(model)
    poison(static)
    lengths = [0] * 4
    for _ in range(60):
        parts = []
        for slot in range(4):
            if chance.random() < 0.3:
                continue
            if chance.random() < 0.1:
                lengths[slot] = 0  # another request
            if chance.random() < 0.1 and lengths[3 - slot]:
                copied = chance.randint(1, lengths[3 - slot])
                for one in (static, plain):
                    one.copy_slot(3 - slot, slot, copied)
                lengths[slot] = copied
            count = chance.choice([1, 1, 2, 3, 4, 5, 6, 9, 10, 11])
            first = min(max(0, lengths[slot] - chance.randint(0, 3)), 128 - count)
            parts.append((slot, first, [chance.randrange(VOCABULARY_SIZE) for _ in range(count)]))
            lengths[slot] = first + count
        if not parts:
            continue
        num_rows = sum(len(tokens) for _, _, tokens in parts)
        asked = sorted(chance.sample(range(num_rows), chance.randint(0, num_rows)))
        got, expected = step(static, parts, asked), step(plain, parts, asked)
        assert torch.allclose(got, expected, atol=1e-3), (parts, asked)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("length", [126, 127, 128, 129, 255, 256, 257, 299, 300])
@pytest.mark.parametrize("rows", [1, *(n + d for n in ROWS_EACH[1:] for d in (0, 1))])
def test_on_both_sides_of_each_border_of_context_and_rows(length, rows):
    model = random_model()
    static, plain = (make(model, num_slots=3, max_length=300) for make in (static_decoder, decoder))
    poison(static)
    if length - rows < 0:
        return
    prompt = [(7 * i) % VOCABULARY_SIZE for i in range(length - rows)]
    for one in (static, plain):
        step(one, [(1, 0, prompt)], [])
    tokens = list(range(rows))
    assert torch.allclose(
        step(static, [(1, length - rows, tokens)]), step(plain, [(1, length - rows, tokens)]), atol=1e-3
    )


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 9])
def test_every_number_of_leading_slots(num_slots):
    model = random_model()
    static, plain = (make(model, num_slots=9, max_length=32) for make in (static_decoder, decoder))
    poison(static)
    static.cache._storage[:, :, num_slots:] = torch.nan  # slots of nobody
    if num_slots > 1:
        static.cache._storage[:, :, 0] = torch.nan  # among them one before the others
    parts = [(slot, 0, [slot + 1, 5]) for slot in range(min(1, num_slots - 1), num_slots)]
    assert torch.allclose(step(static, parts), step(plain, parts), atol=1e-3)


def test_a_step_writes_nothing_but_its_own_rows_and_scratch():
    static = static_decoder(MODEL)
    step(static, [(slot, 0, [1, 2, 3, 4, 5]) for slot in range(4)])
    before = static.cache._storage.clone()
    step(static, [(2, 5, [6, 7, 8])])
    changed = (static.cache._storage != before)[..., :, : static.max_length, :].any(-1).any(0).any(0).any(1)  # [S, T]
    assert changed.nonzero().tolist() == [[2, 5], [2, 6], [2, 7]]


def test_a_chosen_answer_is_not_overwritten_by_the_next_step():
    static = static_decoder(MODEL)
    first = step(static, [(0, 0, [1, 2])])
    kept = first.clone()
    step(static, [(0, 2, [9, 10])])
    assert torch.equal(first, kept)


@pytest.mark.parametrize("most_rows", [512, 5])
def test_tokens_that_are_still_on_the_device(most_rows, monkeypatch):
    """Also where the ladder ends before, and the plain decoder runs."""
    monkeypatch.setattr("livedraft.models.static_decoder._MOST_ROWS", most_rows)
    static, plain = static_decoder(MODEL), decoder(MODEL)
    drafted = torch.tensor([[11, 21, 31], [12, 22, 32]])  # [k, B]
    static.take_proposed(torch.full((3, 4), 60), torch.ones(4, dtype=torch.bool))  # of an earlier round
    static.take_proposed(drafted, torch.tensor([True, False, True]))
    static.take_proposed(torch.tensor([[41, 42]]), torch.tensor([False, True]))  # of another draft
    parts = [(0, 0, [5, UNKNOWN, UNKNOWN]), (1, 0, [6, UNKNOWN]), (2, 0, [7, UNKNOWN, UNKNOWN])]
    known = [(0, 0, [5, 11, 12]), (1, 0, [6, 42]), (2, 0, [7, 31, 32])]
    assert torch.allclose(step(static, parts), step(plain, known), atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kernel", [attend_by_matmul, attend_by_flex])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_other_attention_kernels_give_the_same(name, kernel):
    model = random_model(FAMILIES[name])
    other, plain = static_decoder(model, attention=("other", kernel)), decoder(model)
    poison(other)
    for parts in ([(0, 0, [1, 2, 3]), (2, 0, [4] * 9)], [(0, 3, [5]), (2, 9, [6])], [(0, 4, [5, 8]), (3, 0, [6])]):
        assert torch.allclose(step(other, parts), step(plain, parts), atol=1e-3)


def test_the_fastest_attention_is_taken_if_it_is_right_and_clearly_faster():
    def wrong(*parts):
        return -attend_by_sdpa(*parts)

    def missing(*parts):
        raise RuntimeError("no such kernel")

    seconds = {"sdpa": 10.0, "wrong": 1.0, "missing": 0.0, "matmul": 9.9, "flex": 5.0}
    kernels = {"sdpa": attend_by_sdpa, "wrong": wrong, "missing": missing, "matmul": attend_by_matmul}
    static = static_decoder(MODEL)

    def timed(replay):
        replay()
        return seconds[static.attention[0]]

    assert static.measured_attention((4, 5, 128), kernels, timed)[0] == "sdpa"
    kernels["flex"] = attend_by_matmul
    assert static.measured_attention((4, 5, 128), kernels, timed) == ("flex", attend_by_matmul)


def test_most_rounds_are_replayed_and_only_long_segments_are_not(monkeypatch):
    static = static_decoder(MODEL)
    eager = []
    monkeypatch.setattr(
        "livedraft.models.decoder.Decoder._attend_over_cache",
        lambda self, segments, *rest, right=static._attend_over_cache: (eager.append(segments), right(segments, *rest))[
            1
        ],
    )
    step(static, [(0, 0, [1] * 40), (1, 0, [2] * 3)])
    step(static, [(0, 40, [1]), (1, 3, [2] * 9)])
    assert [[s.num_rows for s in segments] for segments in eager] == [[40]]


def test_the_draft_is_no_longer_than_the_rows_allow():
    assert ROWS_EACH[-1] == MAX_DRAFTED + 1
