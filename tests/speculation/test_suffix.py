"""The match finder against a search by hand; what traffic gives to whom; and what is learnt from what was said."""

import random

import pytest

from livedraft.speculation.suffix import History, Match, MatchStatistics, SuffixMatcher, Traffic


def longest_by_hand(texts, context, min_match):
    """Over whole texts: the longest match of the context's end that something follows, and all that follow a match as long."""
    best, following = min_match - 1, set()
    for text in texts:
        for end in range(min_match, len(text)):
            length = 0
            while length < min(end, len(context), 64) and text[end - 1 - length] == context[-1 - length]:
                length += 1
            if length > best:
                best, following = length, set()
            if length == best and length >= min_match:
                following.add((text[end], len(text) - end))
    return (best, following) if following else (0, set())


@pytest.mark.parametrize("min_match", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [3, 6, 20])
def test_the_longest_match_is_found(vocabulary, min_match, monkeypatch):
    for limit in ("_CANDIDATES", "_LOOKED_AT"):
        monkeypatch.setattr(f"livedraft.speculation.suffix.{limit}", 10_000)
    chance = random.Random(vocabulary)
    history, texts = History(5_000, min_match=min_match, table_bits=7), []  # a small table: many tokens share a slot
    for _ in range(60):
        texts.append(chance.choices(range(vocabulary), k=chance.randrange(1, 40)))
        history.extend(texts[-1])
        history.break_off()
        context = chance.choices(range(vocabulary), k=chance.randrange(1, 30))
        length, end = history.find(context)
        expected, following = longest_by_hand(texts, context, min_match)
        assert length == expected
        if length:
            continuation = history.following(end, 1_000)
            assert (continuation[0], len(continuation)) in following
            assert history.read(end - length, end) == context[-length:]


def test_what_is_overwritten_is_never_found():
    """A ring of 50 tokens under constant writing: every match found lies in the last 50, whole."""
    chance = random.Random(1)
    history, everything = History(50, table_bits=5), []
    for _ in range(400):
        text = chance.choices(range(3), k=chance.randrange(1, 20))
        history.extend(text)
        history.break_off()
        everything += [*text, -1]
        assert history.read(history.start, history.end) == everything[-50:]
        context = chance.choices(range(3), k=8)
        length, end = history.find(context)
        if length:
            assert end - length >= history.start
            assert everything[end - length : end] == context[-length:]
            assert everything[end] == history.following(end, 1)[0]


def test_a_search_looks_at_few_candidates():
    history = History(100_000)
    history.extend([1, 2, 3, 4] * 20_000)
    history.break_off()
    context = [9, 1, 2, 3]
    assert history.find(context)[0] == 3
    calls = 0

    def count(_position):
        nonlocal calls
        calls += 1
        return True

    history.find(context, count)
    assert calls <= 24


def matcher(traffic=None, prompt=(), client_key="", longest=8, statistics=None):
    traffic = traffic or Traffic(1000)
    traffic.statistics = statistics or traffic.statistics
    made = SuffixMatcher(traffic=traffic, client_key=client_key, longest=longest)
    made.start(list(prompt), max_tokens=50)
    return made


def test_a_request_finds_itself_and_then_others():
    own = matcher(prompt=[1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert own.find() == Match(length=3, continuation=(4, 5, 6, 1, 2, 3, 4, 5), is_own=True)
    own.commit([4, 5])
    assert own.find() == Match(length=5, continuation=(6, 1, 2, 3, 4, 5, 6, 1), is_own=True)
    own.commit([9])
    assert own.find() is None
    traffic = Traffic(1000)
    traffic.add([7, 8, 9, 10, 11])
    other = matcher(traffic, prompt=[0, 7, 8, 9])
    assert other.find() == Match(length=3, continuation=(10, 11), is_own=False)
    assert matcher(traffic, prompt=[0, 7, 8, 9], longest=1).find().continuation == (10,)
    # Its own text wins among equals; a longer match elsewhere wins.
    assert matcher(traffic, prompt=[8, 9, 10, 5, 8, 9, 10]).find().is_own
    assert not matcher(traffic, prompt=[8, 9, 10, 5, 7, 8, 9, 10]).find().is_own


def test_texts_do_not_run_into_each_other():
    traffic = Traffic(1000)
    traffic.add([1, 2, 3])
    traffic.add([4, 5, 6])
    assert matcher(traffic, prompt=[1, 2, 3]).find() is None
    assert matcher(traffic, prompt=[2, 3, 4]).find() is None


def test_clients_are_apart_where_they_have_to_be():
    traffic = Traffic(1000, is_per_client=True)
    traffic.add([1, 2, 3, 4], "alice")
    traffic.add([1, 2, 3, 5], "bob")
    traffic.add([1, 2, 3, 6], "")
    found = {key: matcher(traffic, [1, 2, 3], key).find() for key in ("alice", "bob", "carol", "")}
    assert found["alice"].continuation == (4,)
    assert found["bob"].continuation == (5,)
    assert found["carol"] is None
    assert found[""] is None
    shared = Traffic(1000)
    shared.add([1, 2, 3, 4], "alice")
    assert matcher(shared, [1, 2, 3], "bob").find() is not None


def test_old_texts_are_forgotten_and_all_of_them_on_demand():
    now = [0.0]
    traffic = Traffic(1000, max_age_seconds=10.0, clock=lambda: now[0])
    traffic.add([1, 2, 3, 4])
    now[0] = 8.0
    traffic.add([5, 6, 7, 8])
    assert matcher(traffic, [1, 2, 3]).find() is not None
    now[0] = 12.0
    assert matcher(traffic, [1, 2, 3]).find() is None
    assert matcher(traffic, [5, 6, 7]).find() is not None
    traffic.forget()
    assert matcher(traffic, [5, 6, 7]).find() is None
    assert traffic.num_tokens == 0


def test_memory_is_bounded():
    traffic = Traffic(1000)
    for number in range(2000):
        traffic.add([number] * 5)
    assert traffic.num_tokens == 1000
    assert len(traffic._texts) < 400


def test_statistics_follow_what_was_said():
    statistics = MatchStatistics()
    match = Match(length=4, continuation=(1, 2, 3), is_own=True)
    before = [statistics.acceptance(match, offset) for offset in range(3)]
    assert before == sorted(before)  # the longer the match the better the guess
    for _ in range(300):
        statistics.record(match, [1, 9])  # the first right, the second wrong, the third never reached
    after = [statistics.acceptance(match, offset) for offset in range(3)]
    assert after[0] > 0.9
    assert after[1] < 0.1
    assert after[2] == before[2]
    assert statistics.acceptance(Match(length=4, continuation=(1,), is_own=False), 0) == before[0]


def test_a_guess_that_was_not_proposed_teaches_too():
    statistics = MatchStatistics()
    for _ in range(100):
        own = matcher(prompt=[1, 2, 3, 4, 1, 2, 3], statistics=statistics)
        own.find()
        own.commit([7])
    assert statistics.acceptance(own.match, 0) < 0.1


def test_the_source_that_was_not_chosen_is_judged_too():
    """Or one that did badly for a while would never be tried again."""
    statistics, traffic = MatchStatistics(), Traffic(1000)
    traffic.add([7, 8, 9, 10, 11, 12])
    shared = Match(length=3, continuation=(10,), is_own=False)
    for _ in range(100):
        statistics.record(shared, [0])
    assert statistics.acceptance(shared, 0) < 0.05
    for _ in range(150):
        made = matcher(traffic, [7, 8, 9, 5, 7, 8, 9], statistics=statistics)
        made.find()
        made.commit([10])
    assert statistics.acceptance(shared, 0) > 0.5
    assert not made.match.is_own


def test_a_text_that_repeats_itself_is_continued_past_its_end():
    assert matcher(prompt=[4, 5] * 6, longest=7).find().continuation == (4, 5, 4, 5, 4, 5, 4)
    assert matcher(prompt=[7] * 20, longest=5).find().continuation == (7,) * 5


def test_other_clients_texts_do_not_use_up_the_search():
    traffic = Traffic(5000, is_per_client=True)
    traffic.add([1, 2, 3, 4, 5, 6, 7], "alice")
    for number in range(40):
        traffic.add([90 + number, 4, 5, 6, 99], "bob")
    assert matcher(traffic, [1, 2, 3, 4, 5, 6], "alice").find().continuation == (7,)


def test_a_text_longer_than_the_memory_is_found_as_far_as_it_is_kept():
    traffic = Traffic(100)
    traffic.add([n % 60 for n in range(1000)])
    traffic.add([61, 62, 63])
    assert matcher(traffic, [50, 51, 52], longest=2).find().continuation == (53, 54)


def test_what_was_served_meanwhile_stays_when_old_texts_come_in():
    live, old = Traffic(1000), Traffic(1000)
    live.add([1, 2, 3, 4], "a")
    live.add([5, 6, 7, 8], "b")
    old.add([11, 12, 13, 14])
    live.take_over(old)
    for prompt, continuation in (([1, 2, 3], (4,)), ([5, 6, 7], (8,)), ([11, 12, 13], (14,))):
        assert matcher(live, prompt).find().continuation == continuation
    assert [text.client_key for text in live._texts] == ["", "a", "b"]


def test_a_copy_goes_its_own_way():
    """A new route starts with the texts that were served where it comes from."""
    default = Traffic(1000, is_per_client=True)
    default.add([1, 2, 3, 4], "a")
    route = default.copied()
    route.add([1, 2, 3, 9], "a")
    route.statistics.record(Match(length=3, continuation=(4,), is_own=False), [0])
    assert matcher(route, [1, 2, 3], "a").find().continuation == (9,)
    assert matcher(route, [1, 2, 3], "b").find() is None
    default.add([1, 2, 3, 5], "a")
    assert matcher(default, [1, 2, 3], "a").find().continuation == (5,)
    shared = Match(length=3, continuation=(4,), is_own=False)
    assert route.statistics.acceptance(shared, 0) < default.statistics.acceptance(shared, 0)
    route.forget()
    assert default.num_tokens > 0


def test_a_request_whose_matches_do_better_than_the_routes_is_known_by_it():
    copying, other = matcher(prompt=[1, 2, 3, 4, 5, 6] * 2), matcher(prompt=[1, 2, 3, 4, 5, 6] * 2)
    for round_number in range(6):
        copying.find(), other.find()
        copying.commit(copying.match.continuation[:2])
        other.commit([50 + round_number])
    assert copying.own.factor > 1.1
    assert other.own.factor < 1.0
