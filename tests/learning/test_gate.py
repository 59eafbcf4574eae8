import numpy as np
import pytest

from livedraft.learning.gate import FALSE_PROMOTION_RATE, decide, harmed_stream, one_sided_p_value


def requests(generator, count, gain=0.0, spread=0.08):
    """Parent and candidate alphas of the same requests: requests differ much, the versions by `gain` on average."""
    parent = generator.uniform(0.2, 0.6, size=count)
    return (parent + gain + generator.normal(0, spread, size=count)).tolist(), parent.tolist()


@pytest.mark.parametrize("count", [8, 20])
def test_candidates_that_are_no_better_pass_at_most_one_time_in_ten(count):
    """200 streams of null candidates, each tested up to five times as an operator's day would: the whole stream's rate."""
    generator = np.random.default_rng(7)
    num_promoted = 0
    for stream in range(200):
        for number in range(1, 6):
            candidate, parent = requests(generator, count)
            decision = decide(candidate, parent, num_positions=1000, test_number=number, seed=stream)
            if decision.promote:
                num_promoted += 1
                break
    assert num_promoted / 200 <= FALSE_PROMOTION_RATE


def test_a_merely_lucky_candidate_is_refused():
    """One request much better, the others a little worse: a higher mean, but no evidence."""
    parent = [0.4] * 10
    candidate = [0.39] * 9 + [0.9]
    decision = decide(candidate, parent, num_positions=1000, test_number=1)
    assert decision.candidate_alpha > decision.parent_alpha
    assert decision.promote is False


def test_a_sabotaged_candidate_is_refused():
    candidate, parent = requests(np.random.default_rng(0), 50, gain=-0.2)
    decision = decide(candidate, parent, num_positions=1000, test_number=1)
    assert decision.promote is False
    assert decision.p_value > 0.99


def test_a_clearly_better_candidate_passes_with_few_requests_and_a_small_gain_with_many():
    generator = np.random.default_rng(0)
    assert decide(*requests(generator, 10, gain=0.2), num_positions=600, test_number=2).promote
    assert decide(*requests(generator, 200, gain=0.03), num_positions=9000, test_number=2).promote


@pytest.mark.parametrize(("count", "num_positions"), [(7, 5000), (50, 499), (0, 0)])
def test_too_little_evidence_is_no_decision(count, num_positions):
    decision = decide([0.9] * count, [0.1] * count, num_positions=num_positions, test_number=1)
    assert decision.promote is None
    assert "not enough evidence" in decision.reason


def test_levels_of_all_tests_since_a_promotion_sum_to_the_stated_rate():
    levels = [decide([0.5] * 9, [0.4] * 9, num_positions=900, test_number=n).level for n in range(1, 2000)]
    assert sum(levels) == pytest.approx(FALSE_PROMOTION_RATE, rel=1e-3)


def test_no_spread_is_decided_by_the_sign():
    assert one_sided_p_value(np.full(8, 0.1), seed=0) == 0.0
    assert one_sided_p_value(np.zeros(8), seed=0) == 1.0


def test_a_stream_is_harmed_only_beyond_chance():
    alike, spread = [0.03] * 8, [0.4, -0.34] * 4
    for falls, is_harmed in ((alike, True), (spread, False), (alike[:7], False), ([0.01] * 8, False)):
        streams = ["a"] * len(falls) + ["b"] * 20
        parents = [0.5] * len(streams)
        candidates = [0.5 - fall for fall in falls] + [0.7] * 20
        assert (harmed_stream(streams, candidates, parents) is not None) == is_harmed


def test_the_decision_is_reproducible():
    case = requests(np.random.default_rng(0), 12, gain=0.05)
    assert decide(*case, num_positions=900, test_number=1, seed=4) == decide(
        *case, num_positions=900, test_number=1, seed=4
    )
