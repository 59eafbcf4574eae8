import numpy as np
import pytest

from livedraft.learning.drift import LONG, SHORT, DriftWatch, change_point


def see(watch, alphas, first_id):
    return watch.see({first_id + number: alpha for number, alpha in enumerate(alphas)})


@pytest.mark.parametrize("num_new", [8, 12, 16])
def test_a_fall_is_seen_and_where_it_began(num_new):
    noise = np.random.default_rng(num_new).normal(0, 0.03, 200)
    watch = DriftWatch()
    assert see(watch, 0.45 + noise[:100], 0) is None
    found = None
    for number in range(num_new):
        found = found or see(watch, [0.12 + noise[100 + number]], 100 + number)
    assert found.since_id == 100
    assert found.alpha < 0.75 * found.before
    assert watch.recent == [] or num_new > 8  # nothing of the old traffic is remembered


def test_ups_and_downs_of_the_same_traffic_are_no_drift():
    generator = np.random.default_rng(0)
    watch = DriftWatch()
    assert not [n for n in range(1000) if see(watch, [generator.normal(0.4, 0.09)], n)]


def test_too_few_requests_say_nothing():
    watch = DriftWatch()
    assert see(watch, [0.5] * (LONG // 2 - 1), 0) is None
    assert see(watch, [0.0] * SHORT, 1000) is None
    assert len(watch.recent) == SHORT


def test_change_points():
    assert change_point([0.5] * 6 + [0.1] * 10) == 6
    assert change_point([0.1] * 16) == 0
    assert change_point([0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.15, 0.25]) == 0
    assert change_point([0.9] + [0.1] * 7) == 1


def test_a_few_bad_requests_are_suspicious_and_no_drift_yet():
    watch = DriftWatch()
    assert watch.see(dict(enumerate([0.4] * 60))) is None
    assert not watch.is_suspicious
    assert watch.see({60: 0.1, 61: 0.1, 62: 0.1, 63: 0.1}) is None
    assert watch.is_suspicious
    assert watch.see(dict.fromkeys(range(64, 70), 0.4)) is None
    assert not watch.is_suspicious
