"""The paper plan's arithmetic, against what can be worked out by hand."""

from dataclasses import replace

import pytest

from livedraft.bench.scale import Figures, simulate

FIGURES = Figures()


def test_traffic_grows_with_the_replicas_and_what_is_trained_on_stops_at_what_the_learner_can():
    one, many = simulate(1, FIGURES), simulate(1000, FIGURES)
    assert one.tapped_tokens_per_second == 60 and many.tapped_tokens_per_second == 60_000
    assert one.tapped_megabytes_per_second == pytest.approx(60 * FIGURES.bytes_per_token / 1e6)
    assert one.share_trained_on == 1.0 and one.learner_load == pytest.approx(60 / 1000)
    assert many.share_trained_on == pytest.approx(1000 / 60_000) and many.learner_load == 1.0


def test_a_rollout_goes_by_a_quarter_at_a_time_and_no_more_than_so_many():
    fetch = FIGURES.version_bytes / FIGURES.learner_bytes_per_second
    assert simulate(3, FIGURES).rollout_seconds == pytest.approx(3 * (fetch + 0.5 + 0.3))
    assert simulate(16, FIGURES).rollout_seconds == pytest.approx(4 * (4 * fetch + 0.5 + 0.3))
    assert simulate(1000, FIGURES).rollout_seconds == pytest.approx(125 * (8 * fetch + 0.5 + 0.3))
    one_by_one = replace(FIGURES, fetches_together=1)
    assert simulate(1000, FIGURES).staleness_seconds < simulate(1000, one_by_one).staleness_seconds


def test_swap_traffic_is_promotions_times_replicas_times_size():
    ten = simulate(10, FIGURES, hours=2)
    expected = ten.promotions_per_hour * 10 * FIGURES.version_bytes / 3600 / 1e6
    assert ten.swap_megabytes_per_second == pytest.approx(expected)
    assert ten.stopped_share == pytest.approx(ten.promotions_per_hour * FIGURES.pause_seconds / 3600)


def test_without_a_promotion_everything_is_as_old_as_the_run():
    none = simulate(1, replace(FIGURES, promoted_share=0.0), hours=1)
    assert none.promotions_per_hour == 0 and none.staleness_seconds == pytest.approx(1800, abs=1)
