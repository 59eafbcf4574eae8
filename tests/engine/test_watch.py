"""The judgement alone: counters in, a finding out."""

import numpy as np
import pytest

from livedraft.engine.watch import CANARY_ROUNDS, WATCHED_REQUESTS, LiveCounts, judge
from livedraft.speculation.stats import SpeculationStats


def counts(rate, rounds=600, requests=10):
    return LiveCounts(
        num_requests=requests, num_rounds=rounds, num_accepted=round(rate * rounds), num_drafted_tokens=2 * rounds
    )


NOTHING = counts(0, 0, 0)


@pytest.mark.parametrize(
    ("stage", "new", "old", "expected", "finding"),
    [
        ("canary", counts(0.9, CANARY_ROUNDS - 1, 1), counts(0.4), 0.4, "undecided"),
        ("canary", counts(0.4, CANARY_ROUNDS, 1), counts(0.4), 0.4, "fine"),
        ("canary", counts(0.0, CANARY_ROUNDS, 4), counts(0.4), 0.4, "worse"),
        ("canary", counts(0.3, 60, 1), counts(0.4), 0.4, "fine"),  # one request says little; the watch goes on
        ("canary", counts(0.4, 60, 2), NOTHING, 0.4, "fine"),  # the old one did not draft: the gate's figure stands in
        ("canary", counts(0.0, 60, 4), NOTHING, 0.5, "worse"),
        ("canary", counts(0.4, 60, 2), NOTHING, None, "undecided"),
        ("watched", counts(0.4), counts(0.4), None, "undecided"),
        ("watched", counts(0.4, 6000, WATCHED_REQUESTS), counts(0.4), None, "fine"),
        ("watched", counts(0.1, 600, 10), counts(0.4), None, "worse"),
        ("watched", counts(0.39, 60000, 1000), counts(0.4, 60000, 1000), None, "fine"),  # within the margin
        ("watched", counts(0.3, 60000, 1000), counts(0.4, 60000, 1000), None, "worse"),
    ],
)
def test_findings(stage, new, old, expected, finding):
    judgement = judge(stage, new, old, expected=expected)
    assert judgement.finding == finding
    assert judgement.reason
    assert judgement.numbers["live_rounds"] == new.num_rounds


def test_a_lower_figure_that_is_taken_for_fine_says_why():
    """Read by people: 0.30 against 0.40 and "no harm" would look like a fault."""
    lower, higher = (judge("canary", counts(rate, 60, 1), counts(0.4), expected=None) for rate in (0.3, 0.5))
    assert lower.reason.startswith("first drafted tokens accepted live: 0.30 against 0.40 (by chance alone down to 0.")
    assert lower.reason.endswith("; requests so far: 1)")
    assert higher.reason == "first drafted tokens accepted live: 0.50 against 0.40"


def test_a_version_that_is_as_good_is_hardly_ever_called_worse():
    """Requests differ: each has an acceptance of its own, and the watch looks after every one of 64 requests."""
    generator = np.random.default_rng(0)

    def stream():
        rate = np.clip(generator.normal(0.45, 0.12, size=WATCHED_REQUESTS), 0.02, 0.98)
        return np.cumsum(generator.binomial(40, rate))

    num_worse = 0
    for _ in range(400):
        new, old = stream(), stream()
        for n in range(1, WATCHED_REQUESTS + 1):
            old_n = max(1, n // 9)
            a = LiveCounts(num_requests=n, num_rounds=40 * n, num_accepted=int(new[n - 1]), num_drafted_tokens=0)
            b = LiveCounts(
                num_requests=old_n, num_rounds=40 * old_n, num_accepted=int(old[old_n - 1]), num_drafted_tokens=0
            )
            if judge("watched", a, b, expected=None).finding == "worse":
                num_worse += 1
                break
    assert num_worse <= 8  # 2 %


def test_counts_are_taken_from_the_engines_statistics():
    stats = SpeculationStats()
    stats.record(num_drafted=3, num_accepted=2, num_emitted=3)
    stats.record(num_drafted=2, num_accepted=0, num_emitted=1)
    stats.record(num_drafted=0, num_accepted=0, num_emitted=1)
    stats.num_requests = 1
    found = LiveCounts.of(stats)
    assert (found.num_rounds, found.num_accepted, found.num_drafted_tokens) == (2, 1, 5)
    assert found.rate == 0.5
    assert found.since(found) == LiveCounts.of(None)
