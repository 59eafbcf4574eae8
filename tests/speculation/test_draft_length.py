import random

import pytest

from livedraft.speculation.draft_length import (
    PRIOR_WEIGHT,
    PROBE_INTERVAL,
    CostModel,
    DraftLength,
    DraftLengthPolicy,
    expected_tokens,
)
from livedraft.speculation.own_acceptance import OwnAcceptance
from livedraft.speculation.stats import SpeculationStats


def costs(c=0.05, slope=0.0):
    return CostModel(
        target_seconds_by_rows={rows: 1.0 + slope * (rows - 1) for rows in (1, 4, 9, 64)},
        draft_seconds_by_requests={1: c},
    )


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.6, 3, 2.18), (0.8, 3, 2.95), (0.5, 5, 1.97), (0.7, 5, 2.94), (0.9, 5, 4.69), (0.8, 8, 4.33)],
)
def test_expected_tokens_is_the_closed_form(alpha, k, tokens):
    assert expected_tokens([alpha] * k, k) == pytest.approx(tokens, abs=0.01)


@pytest.mark.parametrize(
    ("slope", "c", "alpha", "best"),
    [
        (0, 0.05, 0.5, 3),
        (0, 0.1, 0.7, 4),
        (0.1, 0.05, 0.6, 2),
        (0.25, 0.1, 0.8, 3),
        (0.5, 0.1, 0.6, 0),
        (0, 0.2, 0.7, 3),
    ],
)
def test_best_length_is_the_tables(slope, c, alpha, best):
    """Against an independent table of best lengths by acceptance and cost (Leviathan's formula with verify cost)."""
    policy = DraftLengthPolicy(costs(c, slope), max_tokens=13, prior=alpha)
    assert policy.best(1) == best


def test_batch_makes_long_drafts_dear():
    policy = DraftLengthPolicy(costs(0.02, 0.05), max_tokens=8, prior=0.6)
    assert policy.best(1) > policy.best(8)


def test_learns_from_verdicts_and_positions_after_a_rejection_say_nothing():
    policy = DraftLengthPolicy(costs(), max_tokens=4, prior=0.5)
    generator = random.Random(0)
    for _ in range(2000):
        num_accepted = 0
        while num_accepted < 4 and generator.random() < (0.8, 0.6, 0.4, 0.2)[num_accepted]:
            num_accepted += 1
        policy.record(4, num_accepted)
    assert policy.acceptance_by_position == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.08)


def test_zero_is_chosen_probed_and_left_again():
    policy = DraftLengthPolicy(costs(c=0.3), max_tokens=4, prior=0.01)
    chosen = [policy.choose(1).k for _ in range(3 * PROBE_INTERVAL)]
    assert sorted(set(chosen)) == [0, 2]
    assert chosen.count(2) == 3
    policy.set_prior(0.7)  # a better version came into service
    assert policy.choose(1).k > 0


def test_fixed_length_is_kept():
    policy = DraftLengthPolicy(costs(c=9.0), max_tokens=8, fixed=5, prior=0.0)
    assert [policy.choose(1) for _ in range(3)] == [DraftLength(k=5)] * 3


def test_the_choice_is_explained_in_words():
    fixed = DraftLengthPolicy(costs(), max_tokens=8, fixed=4)
    assert fixed.explained(1) == (4, "fixed by num_speculative_tokens")
    good = DraftLengthPolicy(costs(), max_tokens=8, prior=0.8)
    k, reason = good.explained(1)
    assert k == good.best(1)
    gain = expected_tokens([0.8] * k, k) / (1 + 0.05 * k)
    assert f"{gain:.2f} × plain decoding" in reason
    k, reason = DraftLengthPolicy(costs(), max_tokens=8, prior=0.0).explained(1)
    assert k == 0
    assert "no length pays: the best would give 0.95 × plain decoding" in reason
    nothing = DraftLengthPolicy(costs(), max_tokens=0)
    assert nothing.explained(1)[0] == 0


def test_cost_curve_is_interpolated_and_never_falls_below_one_row():
    model = CostModel(target_seconds_by_rows={1: 1.0, 5: 1.4, 9: 0.9}, draft_seconds_by_requests={1: 0.1})
    assert model.target_seconds(3) == pytest.approx(1.2)
    assert model.target_seconds(9) == 1.0
    assert model.draft_cost == pytest.approx(0.1)
    assert model.verify_cost(5) == pytest.approx(1.4)


def test_stats_are_the_designs_words():
    stats = SpeculationStats()
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None
    stats.record(num_drafted=3, num_accepted=2, num_emitted=3)
    stats.record(num_drafted=2, num_accepted=0, num_emitted=1)
    stats.record(num_drafted=0, num_accepted=0, num_emitted=1)
    assert stats.acceptance_rate == 2 / 5
    assert stats.mean_acceptance_length == 1 + 2 / 2
    assert stats.block_efficiency == 5 / 3
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_drafting_goes_on_while_one_more_token_is_worth_its_cost():
    """Dearer steps stop earlier, and the threshold is the break-even of the definition."""
    cheap, dear = (DraftLengthPolicy(costs(c), max_tokens=8, prior=0.6).choose(1) for c in (0.02, 0.1))
    assert cheap.k == dear.k == 8
    assert 0 < cheap.stop_below[0] < dear.stop_below[0] < 1
    policy = DraftLengthPolicy(costs(0.1), max_tokens=8, prior=0.6)
    best = policy.best(1)
    rate = expected_tokens([0.6] * 8, best) / (0.1 * best + 1.0)
    assert dear.stop_below == pytest.approx([0.1 * rate] * 7)  # flat costs: the same at every position


def test_confidence_is_calibrated_by_verdicts():
    """A draft that says 0.95 and is right half the time is believed at first, then no more."""
    policy = DraftLengthPolicy(costs(), max_tokens=4, prior=0.5)
    assert policy.chances_of(0.95) == pytest.approx((0.95, 0.5))
    for number in range(300):
        policy.record(1, number % 2, [0.95])
    assert policy.chances_of(0.95)[0] == pytest.approx(0.5, abs=0.05)
    assert policy.chances_of(0.15)[0] == pytest.approx(0.15)


def test_where_a_loop_cannot_stop_in_between_its_length_is_chosen_before():
    one = DraftLengthPolicy(costs(0.1), max_tokens=8, prior=0.6, is_stepwise=False)
    length = one.choose(1)
    assert (length.k, length.stop_below) == (one.best(1), ())
    assert 0 < length.k < 8


def test_a_jump_in_cost_ends_drafting_only_where_what_follows_does_not_earn_it_back():
    """Rows are free up to five and then dear: past the jump no chance is enough, before it next to any is."""
    jump = CostModel(target_seconds_by_rows={1: 1.0, 5: 1.0, 6: 3.0, 64: 60.0}, draft_seconds_by_requests={1: 0.05})
    policy = DraftLengthPolicy(jump, max_tokens=8, prior=0.7)
    thresholds = policy.choose(1).stop_below
    assert thresholds[:3] == pytest.approx([thresholds[0]] * 3)
    assert thresholds[0] < 0.2
    assert thresholds[3] == 1.0
    noisy = CostModel(
        target_seconds_by_rows={1: 1.0, 2: 1.0, 3: 1.3, 9: 1.3, 64: 2.0}, draft_seconds_by_requests={1: 0.01}
    )
    thresholds = DraftLengthPolicy(noisy, max_tokens=8, prior=0.9).choose(1).stop_below
    assert thresholds[0] < 0.3 * 2.5 / (1 + 0.9)  # the one step up is earned back by the tokens after it


def test_the_next_tokens_chance_follows_from_the_present_ones_confidence():
    policy = DraftLengthPolicy(costs(), max_tokens=4, prior=0.5)
    for _ in range(200):
        policy.record(2, 2, [0.95, 0.5])
        policy.record(2, 1, [0.45, 0.5])
    assert policy.chances_of(0.95)[1] > 0.9
    assert policy.chances_of(0.45)[1] < 0.1
    assert policy.chances_of(0.15)[1] == pytest.approx(0.5)


def test_rounds_that_stopped_at_unsure_tokens_do_not_promise_too_much():
    """The second token is only ever drafted after a sure first one, and is then always right."""
    policy = DraftLengthPolicy(costs(c=0.2), max_tokens=2, prior=0.9)
    for number in range(400):
        policy.record(*((2, 2, [0.95, 0.95]) if number % 2 else (1, number % 10 > 0, [0.8])))
    first, second = policy.acceptance_by_position
    assert expected_tokens([first, second], 2) - 1.0 - 2 * 0.2 > 1.35  # what the positions promise
    assert policy.value(1, 1) == pytest.approx((2 + 0.8) / 2 - 1.5 * 0.2, abs=0.06)


def test_a_request_that_does_worse_than_its_route_drafts_less_and_tries_again():
    for is_stepwise in (True, False):
        policy = DraftLengthPolicy(costs(0.15), max_tokens=8, prior=0.6, is_stepwise=is_stepwise)
        length = policy.choose(1)
        usual, poor, good = OwnAcceptance(), OwnAcceptance(), OwnAcceptance()
        for _ in range(30):
            poor.record(0.0, 1.0)
            good.record(1.6, 1.0)
        assert policy.adapted(length, usual, 1, 1) is length
        assert policy.adapted(length, poor, 1, 1).k == 0
        better = policy.adapted(length, good, 1, 1)
        assert better.k >= length.k
        assert is_stepwise is (better.stop_below < length.stop_below)
        for _ in range(60):
            poor.fade()
        assert policy.adapted(length, poor, 1, 1).k > 0


def test_a_fresh_outside_estimate_counts_beside_what_was_learnt():
    policy = DraftLengthPolicy(costs(), max_tokens=4, prior=0.1)
    for _ in range(30):
        policy.record(2, 0)
    before = policy.acceptance_by_position[0]
    for _ in range(3):
        policy.refresh_prior(0.6)
    assert before < 0.1 < policy.acceptance_by_position[0]
    policy.refresh_prior(0.1)
    assert policy.prior == 0.1


def test_acceptance_is_kept_between_verdicts_and_is_what_they_say():
    """Against the sum over the same counts, after everything that may change them."""
    made = DraftLengthPolicy(costs(), max_tokens=4)

    def by_hand():
        estimates, lean = [], made.prior
        for reached, accepted in zip(made._reached, made._accepted, strict=True):
            lean = (accepted + PRIOR_WEIGHT * lean) / (reached + PRIOR_WEIGHT)
            estimates.append(lean)
        return estimates

    own = OwnAcceptance()
    for change in (
        lambda: None,
        lambda: made.record(3, 2, [0.9, 0.5, 0.2], own),
        lambda: made.record(2, 2),
        lambda: made.refresh_prior(0.7),
        lambda: made.set_prior(0.1),
    ):
        change()
        assert made.acceptance_by_position == by_hand()
        assert made.acceptance_by_position is made.acceptance_by_position
