import pytest
import torch

from livedraft.config import LearningConfig
from livedraft.learning import rates
from livedraft.learning import trainer as trainer_room
from livedraft.learning.batches import example_from_trace
from livedraft.learning.rates import NUM_REQUESTS, RateTrial
from tests.learning.toy import served_traces, trainer


@pytest.fixture(scope="module")
def examples():
    return [example_from_trace(trace, n) for n, trace in enumerate(served_traces(24))]


def run_trial(monkeypatch, examples, tried):
    for room in (rates, trainer_room):
        monkeypatch.setattr(room, "LEARNING_RATES", tried)
    first = trainer(learning_rate=None)
    trial = RateTrial(first, LearningConfig())
    for start in range(0, NUM_REQUESTS, 2):
        assert not trial.is_over
        batch = examples[start : start + 2]
        trial.step(batch, batch, lambda: None)
        first.step(batch)
    assert trial.is_over
    return first, *trial.winner()


@pytest.mark.parametrize("tried", [(3e-3, 1e-7), (1e-7, 3e-3), (1e-7, 3e-3, 1e-6)])
def test_the_rate_that_learns_wins_whatever_its_place(monkeypatch, examples, tried):
    first, winner, alphas = run_trial(monkeypatch, examples, tried)
    assert winner.base_rate == 3e-3
    assert (winner is first) == (tried[0] == 3e-3)
    assert max(alphas, key=alphas.get) == "0.003"
    if winner is not first:
        assert winner.flops >= 2 * first.flops  # the losers' work is counted too


def test_a_rate_that_ruins_the_draft_loses(monkeypatch, examples):
    _, winner, alphas = run_trial(monkeypatch, examples, (1e-3, 0.99))
    assert winner.base_rate == 1e-3
    assert alphas["0.99"] < alphas["0.001"]


def test_the_choice_survives_a_restart():
    made = trainer(learning_rate=None)
    made.base_rate = 1e-3
    again = trainer(learning_rate=None)
    again.load_state_tensors({name: torch.as_tensor(t).clone() for name, t in made.state_tensors().items()})
    assert again.base_rate == 1e-3
    again.num_steps = 50
    assert again.learning_rate == 1e-3
