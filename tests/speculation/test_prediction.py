from livedraft.speculation.prediction import Prediction


def test_follows_while_it_agrees_and_proposes_what_follows():
    prediction = Prediction([1, 2, 3, 4, 5])
    assert prediction.propose(2) == [1, 2]
    prediction.commit([1, 2, 3])
    assert prediction.propose(9) == [4, 5]
    prediction.commit([4, 5])
    assert prediction.propose(3) == []
    prediction.commit([6])
    assert prediction.propose(3) == []


def test_is_lost_after_a_change_and_found_again_behind_it():
    prediction = Prediction([1, 2, 3, 4, 5, 6, 7])
    prediction.commit([1, 2, 9])
    assert prediction.propose(3) == []
    prediction.commit([4])
    assert prediction.propose(3) == []  # one token says too little
    prediction.commit([5])
    assert prediction.propose(3) == [6, 7]


def test_the_longest_match_wins_then_the_nearest_one_ahead():
    #                        0  1  2  3  4  5  6  7  8  9 10 11
    prediction = Prediction([7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2, 4])
    prediction.commit([9, 1, 2])
    assert prediction.propose(1) == [4]
    prediction = Prediction([7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2, 4])
    prediction.commit([7, 1, 2, 5, 3, 1, 2])
    assert prediction.propose(1) == [6]


def test_a_long_prediction_of_few_tokens_is_followed_quickly():
    import time

    prediction = Prediction([n * n % 1000 for n in range(100_000)])
    started = time.perf_counter()
    for token in range(200):
        prediction.commit([token * 7 % 1000])
    assert time.perf_counter() - started < 0.5
