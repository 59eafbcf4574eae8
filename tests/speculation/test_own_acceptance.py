from livedraft.speculation.own_acceptance import CatchingUp, WrittenPrompt


def written(num_tokens, promised, *rounds):
    prompt = WrittenPrompt(num_tokens, promised)
    for num_accepted, price in rounds:
        prompt.record(num_accepted, price)
    return prompt


def test_a_promise_is_believed_until_something_came_of_others():
    catching_up = CatchingUp()
    assert catching_up.share(700) == 1.0
    catching_up.record(written(700, 24.0, (1, 0.5), (0, 0.5)))
    assert catching_up.share(700) == 8 / (24 + 8)  # 0 of 24 tokens, beside 8 that count as kept
    assert catching_up.share(600) == catching_up.share(1000)  # about as long
    assert catching_up.share(100) == 1.0  # another kind of request
    for _ in range(100):
        catching_up.refuse(700)
    assert catching_up.share(700) > 0.8  # fades: it is tried again


def test_it_is_a_share_whatever_came_of_it():
    better, worse = CatchingUp(), CatchingUp()
    better.record(written(64, 10.0, (30, 1.0)))
    assert better.share(64) == 1.0
    worse.record(written(64, 10.0, (0, 50.0)))
    assert worse.share(64) == 0.0
