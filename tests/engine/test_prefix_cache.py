from hypothesis import given
from hypothesis import strategies as st

from livedraft.config import EngineConfig
from livedraft.engine.prefix_cache import MIN_SHARED_TOKENS, PrefixCache, num_shared
from tests.tiny import decoder, draft_model, engine, perturbed_draft, random_model, request, serve

MODEL = random_model()


def held(cache, token_ids):
    slot = cache.reserve(token_ids)
    if slot is not None:
        cache.keep(slot, token_ids)
    return slot


SYSTEM = [(7 * n + 3) % 64 for n in range(70)]


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_num_shared_is_the_common_beginning(left, right):
    shared = num_shared(left, right)
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]


def test_the_longest_beginning_wins_and_the_last_prompt_token_is_never_shared():
    cache = PrefixCache(first_slot=4, num_slots=2)
    slots = [held(cache, [*SYSTEM[:19], 63]), held(cache, [*SYSTEM[:40], 1, 2])]
    assert sorted(slots) == [4, 5]
    assert cache.find([*SYSTEM[:40], 9], []) == (slots[1], 40)
    assert cache.find([*SYSTEM[:19], 63], []) == (slots[0], 19)
    assert cache.find([*SYSTEM[:30], 9], [(0, SYSTEM[:29])]) == (slots[1], 30)
    assert cache.find([*SYSTEM, 9], [(0, SYSTEM)]) == (0, 70)
    assert cache.find([1] * 50, []) == (-1, 0)
    assert cache.find(SYSTEM[:MIN_SHARED_TOKENS], []) == (-1, 0)


def test_a_longer_turn_replaces_its_conversation_and_the_least_used_goes_first():
    cache = PrefixCache(first_slot=0, num_slots=2)
    first = held(cache, SYSTEM[:30])
    assert held(cache, SYSTEM[:50]) == first
    assert held(cache, SYSTEM[:40]) is None  # all of it is there
    other = held(cache, [5] * 30)
    cache.find([*SYSTEM[:50], 1], [])
    assert held(cache, [6] * 30) == other
    assert held(cache, [6] * (MIN_SHARED_TOKENS - 1)) is None
    assert PrefixCache(first_slot=0, num_slots=0).reserve(SYSTEM) is None


def conversation_engine(num_prefix_slots, **options):
    target = decoder(MODEL, num_slots=3 + num_prefix_slots, max_length=256)
    config = EngineConfig(max_num_seqs=3, max_model_len=256, prefill_token_budget=32)
    return engine(target, draft_model(perturbed_draft(MODEL, noise=0.05), target), config=config, **options)


def test_turns_of_a_conversation_reuse_and_give_the_same_tokens():
    """Three conversations over two turns; what is reused changes no token and is counted."""
    plain = engine(decoder(MODEL, max_length=256), None, config=EngineConfig(max_num_seqs=4, max_model_len=256))
    cached = conversation_engine(3)
    for mode in ({}, {"temperature": 0.9, "seed": 4}):
        for start in (1, 2, 3):
            first = [*SYSTEM, start]
            answer = serve(cached, [request(first, **mode)])[0]
            assert answer == serve(plain, [request(first, **mode)])[0]
            state = cached.add_request(request([*first, *answer, 9, start], **mode))
            while cached.has_work:
                cached.step()
            assert state.num_cached_tokens >= len(first) + len(answer) - 1
            assert state.output_token_ids == serve(plain, [request([*first, *answer, 9, start], **mode)])[0]
    assert cached.prefixes.num_hit_tokens > 0
    assert cached.stats.acceptance_rate > 0.2  # the draft's cache was copied right, too


def test_a_copy_that_fails_leaves_nothing_that_could_be_reused(monkeypatch):
    served = conversation_engine(1)
    right = served.runner.target.copy_slot

    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(served.runner.target, "copy_slot", fails)
    states = [served.add_request(request([n, *SYSTEM[n:]], n)) for n in (1, 2)]
    while served.has_work:
        served.step()
    assert [state.finish_reason for state in states] == ["length", "length"]
    monkeypatch.setattr(served.runner.target, "copy_slot", right)
    plain = engine(decoder(MODEL, max_length=256), None, config=EngineConfig(max_num_seqs=4, max_model_len=256))
    for _ in range(2):  # computed, then kept and reused: the slot was given back
        assert serve(served, [request([1, *SYSTEM[1:], 5])]) == serve(plain, [request([1, *SYSTEM[1:], 5])])
    assert served.prefixes.num_hit_tokens > 0


def test_after_a_swap_the_target_part_is_reused_and_the_draft_part_rebuilt():
    served = conversation_engine(2)
    serve(served, [request([*SYSTEM, 1])])
    served.offer_draft(draft_model(perturbed_draft(MODEL, noise=0.0), served.runner.target, version="v2"))
    state = served.add_request(request([*SYSTEM, 2]))
    while served.has_work:
        served.step()
    assert state.num_cached_tokens == len(SYSTEM)
    assert state.stats.acceptance_rate == 1.0


def test_requests_that_arrive_together_wait_for_the_one_that_writes_their_beginning():
    """Three with the same 70-token system prompt: one writes it, the others copy it a few rounds later."""
    served = conversation_engine(0)
    states = [served.add_request(request([*SYSTEM, n], n, max_tokens=30)) for n in range(3)]
    while served.has_work:
        served.step()
    assert [state.num_cached_tokens for state in states] == [0, len(SYSTEM), len(SYSTEM)]
    plain = engine(decoder(MODEL, max_length=256), None, config=EngineConfig(max_num_seqs=1, max_model_len=256))
    for n, state in enumerate(states):
        assert state.output_token_ids == serve(plain, [request([*SYSTEM, n], n, max_tokens=30)])[0]
