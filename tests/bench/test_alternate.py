import time

import pytest

from livedraft.bench.alternate import alternate, joined, median_with_interval, median_with_lower_bound


def test_contenders_take_turns_and_are_timed_alone():
    order = []

    def contender(name, seconds, num_tokens):
        def answer(prompt):
            order.append((name, prompt))
            time.sleep(seconds)
            return [prompt] * num_tokens

        return answer

    timings = alternate({"slow": contender("slow", 0.02, 4), "fast": contender("fast", 0.005, 4)}, [7, 8], num_rounds=3)
    assert order[:4] == [("slow", 7), ("fast", 7), ("fast", 8), ("slow", 8)]  # the first place rotates
    assert len(order) == 12
    assert timings["slow"].outputs == [[7] * 4, [8] * 4]
    ratios = timings["fast"].pair_ratios(timings["slow"])
    assert len(ratios) == 6
    assert 1.5 < median_with_lower_bound(ratios)[0] < 5
    assert len(timings["fast"].speeds()) == 3


def test_lower_bound_is_below_the_median_and_close_when_all_agree():
    assert median_with_lower_bound([1.5] * 10) == (1.5, 1.5)
    middle, low = median_with_lower_bound([1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 1.1, 1.3, 1.5, 1.7])
    assert middle == pytest.approx(1.45)
    assert 1.0 <= low < middle


def test_the_interval_holds_the_median_and_narrows_with_more_pairs():
    few, many = [1.0, 1.2, 1.4], [1.0, 1.2, 1.4] * 30
    middle, low, high = median_with_interval(few)
    assert low <= middle == 1.2 <= high
    _, narrow_low, narrow_high = median_with_interval(many)
    assert narrow_high - narrow_low < high - low
    assert median_with_interval([2.0] * 9) == (2.0, 2.0, 2.0)


def test_answers_to_a_group_count_together_and_rest_is_not_timed():
    together = joined(lambda group: [[prompt] * 3 for prompt in group])
    timings = alternate({"one": together}, [[1, 2], [3, 4]], num_rounds=1, rest_seconds=0.2)
    assert timings["one"].outputs == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]
    assert timings["one"].num_tokens == [[6, 6]]
    assert sum(timings["one"].seconds[0]) < 0.2
