"""Which stream a request belongs to: the first thing that says something decides, and nothing a client writes can harm."""

import random

import numpy as np
import pytest

from livedraft.config import RouteRule, RoutingConfig
from livedraft.drafts.router import MAX_NAMES, NUM_FEATURES, TEXTS_BEFORE_TOPICS, TOPICS_NAME, Router, Topics
from livedraft.records import DEFAULT_ROUTE, RouteHints

GERMAN = "Wie viele Äpfel hat Anna noch, wenn sie von ihren zwölf Äpfeln fünf an ihren Bruder verschenkt?"
ENGLISH = "How many apples does Anna have left when she gives five of her twelve apples to her brother?"
NO_HINTS = RouteHints()
SUBJECTS = {
    "shop": "Where is my parcel with the order number {n}, and when will the courier deliver the parcel to me?",
    "code": "Write a Python function that sorts a list of {n} integers and returns the list in reverse.",
    "sql": "Tables: singer(id, name, age), concert(id, year). Write one SQL query that counts concerts of year {n}.",
}


def router(folder=None, **settings):
    kinds = ("system_prompt", "language", "topic")
    return Router(RoutingConfig(**{"by": kinds, **settings}), secret=b"key", folder=folder)


def topics(router, rounds=60, seed=0):
    """By subject, the routes of its later requests."""
    order = [(subject, n) for n in range(rounds) for subject in SUBJECTS]
    random.Random(seed).shuffle(order)
    found = {}
    for place, (subject, n) in enumerate(order):
        route = router.route_of("", SUBJECTS[subject].format(n=n), NO_HINTS)
        if place >= TEXTS_BEFORE_TOPICS:
            found.setdefault(subject, set()).add(route)
    return found


def test_a_clients_own_word_goes_before_everything():
    rules = (RouteRule(route="ruled", language="de"),)
    assert router(rules=rules).route_of("You sell.", GERMAN, RouteHints(named="mine")) == "mine"


def test_rules_go_before_what_is_found_and_all_their_conditions_must_hold():
    rules = (
        RouteRule(route="german-shop", language="de", system_prompt_contains="sell"),
        RouteRule(route="acme", api_key="secret"),
    )
    one = router(rules=rules)
    assert one.route_of("You sell plants.", GERMAN, NO_HINTS) == "german-shop"
    assert one.route_of("You sell plants.", ENGLISH, RouteHints(api_key="secret")) == "acme"
    assert one.route_of("", GERMAN, NO_HINTS) == "language-de"


def test_the_system_prompt_the_language_and_the_key_name_a_stream_without_giving_themselves_away():
    one = router(by=("api_key", "system_prompt", "language"))
    by_prompt = one.route_of("You sell plants.", ENGLISH, NO_HINTS)
    assert by_prompt == one.route_of("You sell plants.", GERMAN, NO_HINTS)
    assert by_prompt != one.route_of("You sell shoes.", ENGLISH, NO_HINTS)
    assert by_prompt.startswith("system-") and "plants" not in by_prompt
    by_key = one.route_of("You sell plants.", ENGLISH, RouteHints(api_key="secret"))
    assert by_key.startswith("key-") and "secret" not in by_key
    assert one.route_of("", GERMAN, NO_HINTS) == "language-de"
    assert one.route_of("", ENGLISH, NO_HINTS) == DEFAULT_ROUTE


def test_the_main_language_is_a_setting():
    one = router(by=("language",), main_language="de")
    assert one.route_of("", GERMAN, NO_HINTS) == DEFAULT_ROUTE
    assert one.route_of("", ENGLISH, NO_HINTS) == "language-en"


def test_subjects_become_topics_without_labels_and_keep_their_numbers_over_a_restart(tmp_path):
    one = router(tmp_path, num_topics=3)
    first = topics(one)
    assert all(len(routes) == 1 for routes in first.values())
    assert len(set.union(*first.values())) == 3
    one.save()
    assert topics(router(tmp_path, num_topics=3), seed=1) == first


def test_traffic_of_one_kind_is_one_topic():
    one = router()
    routes = [one.route_of("", SUBJECTS["shop"].format(n=n), NO_HINTS) for n in range(300)]
    assert len(set(routes[TEXTS_BEFORE_TOPICS:])) == 1


def test_a_text_in_another_language_is_told_by_its_instruction():
    one = router(by=("language",))
    assert one.route_of("", f"Translate German to English: {GERMAN}", NO_HINTS) == DEFAULT_ROUTE
    assert one.route_of("", f"{GERMAN}\nWhat is this text about, in one sentence?", NO_HINTS) == DEFAULT_ROUTE
    assert one.route_of("", f"Eine Frage zum Rechnen: {GERMAN}", NO_HINTS) == "language-de"


def test_identifiers_are_of_no_language():
    assert router(by=("language",)).route_of("", "fjdkahgc bhjdieaf gcehbadj " * 5, NO_HINTS) == DEFAULT_ROUTE


def test_the_question_at_the_end_of_a_long_message_tells_its_topic():
    one = router(num_topics=2)
    chance = random.Random(0)
    found = {"Write one SQL query that answers:": set(), "Which words rhyme with these:": set()}
    for n in range(120):
        question = sorted(found)[n % 2]
        names = " ".join("".join(chance.choices("abcdefghij", k=6)) for _ in range(90))
        route = one.route_of("", f"{names} {question} how many?", NO_HINTS)
        if n >= TEXTS_BEFORE_TOPICS:
            found[question].add(route)
    assert all(len(routes) == 1 for routes in found.values())
    assert len(set.union(*found.values())) == 2


def test_a_topic_keeps_its_number_when_clusters_join_and_part():
    one = Topics(3, None)
    one._count_words(np.ones(NUM_FEATURES, dtype=np.float32))
    near, far = np.zeros((2, NUM_FEATURES), dtype=np.float32)
    near[:9], far[9:18] = 1.0, 1.0
    one._centres_KF, one._counts_K = np.stack([near, far, near]), np.array([5.0, 7.0, 90.0])
    one._join()
    assert one._topics_K == [2, 1, 2]
    one._centres_KF = np.stack([near, far, near[::-1].copy()])
    one._join()
    assert one._topics_K == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"no tensors"])
def test_damaged_topics_start_anew(tmp_path, content):
    (tmp_path / TOPICS_NAME).write_bytes(content)
    assert router(tmp_path).route_of("", ENGLISH, NO_HINTS) == DEFAULT_ROUTE


def test_topics_of_another_number_start_anew(tmp_path):
    one = router(tmp_path, num_topics=3)
    topics(one)
    one.save()
    assert router(tmp_path, num_topics=4).route_of("", ENGLISH, NO_HINTS) == DEFAULT_ROUTE


def test_names_that_clients_make_up_are_bounded_and_old_ones_make_room():
    one = router(by=())
    for n in range(MAX_NAMES):
        assert one.route_of("", "", RouteHints(named=f"n{n}")) == f"n{n}"
    assert one.route_of("", "", RouteHints(named="late")) == DEFAULT_ROUTE
    for _ in range(1100):
        one.route_of("", "", RouteHints(named="n0"))
    assert one.route_of("", "", RouteHints(named="late")) == "late"


@pytest.mark.parametrize("text", ["", " ", "\x00", "\ud800", "a" * 100_000, "🜁" * 500, "1 2 3"])
def test_no_text_is_too_odd(text):
    assert router().route_of(text, text, RouteHints(named="\n", api_key=text))


def test_unless_asked_for_only_clients_and_rules_name_streams():
    one = Router(RoutingConfig(rules=(RouteRule(route="shop", system_prompt_contains="sell"),)), secret=b"key")
    assert one.route_of("You cook.", GERMAN, NO_HINTS) == DEFAULT_ROUTE
    assert one.route_of("You cook.", GERMAN, RouteHints(named="mine")) == "mine"
    assert one.route_of("You sell.", GERMAN, NO_HINTS) == "shop"


def test_off_is_one_stream():
    assert router(enabled=False).route_of("You sell.", GERMAN, RouteHints(named="mine")) == DEFAULT_ROUTE


def test_what_is_kept_of_texts_is_bounded():
    one = router(num_topics=2)
    topics(one)
    assert one._topics._centres_KF.shape == (2, NUM_FEATURES)
    assert one._topics._first == []
