"""Lanes beside one another give what one lane gives, but for the order of sums."""

import threading

import pytest
import torch

from livedraft.config import LearningConfig
from livedraft.learning.batches import example_from_trace
from livedraft.learning.lanes import run_lanes
from livedraft.learning.selection import Selection
from tests.learning.toy import one_layer_draft, served_traces, trainer


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def examples():
    return [example_from_trace(trace, number) for number, trace in enumerate(served_traces(9))]


def test_each_job_has_a_thread_of_its_own_and_the_callers_count_stays(threads):
    threads(2)
    together = threading.Barrier(2)  # fails unless both run at once

    def lane(_number):
        together.wait(timeout=20)
        return threading.current_thread().name, torch.get_num_threads()

    (one, own), (other, others) = run_lanes(2, lane)
    assert one != other
    assert own == others == 1
    assert torch.get_num_threads() == 2
    assert run_lanes(1, lambda _number: threading.current_thread()) == [threading.current_thread()]


def test_what_a_lane_raises_is_raised_when_all_have_ended(threads):
    threads(2)
    ended = []

    def lane(number):
        if number == 0:
            raise ArithmeticError("bad lane")
        ended.append(number)

    with pytest.raises(ArithmeticError, match="bad lane"):
        run_lanes(2, lane)
    assert ended == [1]


def stepped(examples, *, num_threads, threads, selection=None, uses_bf16=False):
    threads(num_threads)
    made = trainer(micro_batch_tokens=64, loss="forward_kl")
    made.uses_bf16 = uses_bf16
    reports = [made.step(examples, selection=selection) for _ in range(3)]
    return made, reports


@pytest.mark.parametrize("is_selecting", [False, True])
def test_two_lanes_learn_what_one_does(examples, threads, is_selecting):
    selection = Selection(reference=one_layer_draft(), fraction=0.5) if is_selecting else None
    alone, of_one = stepped(examples, num_threads=1, threads=threads, selection=selection)
    side_by_side, of_two = stepped(examples, num_threads=2, threads=threads, selection=selection)
    for one, two in zip(of_one, of_two, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-4)
        assert (two.num_positions, two.num_selected) == (one.num_positions, one.num_selected)
    for name, parameter in alone.parameters.items():
        torch.testing.assert_close(side_by_side.parameters[name], parameter, atol=1e-4, rtol=1e-3)
    assert side_by_side.flops == alone.flops
    again, _ = stepped(examples, num_threads=2, threads=threads, selection=selection)
    for name, parameter in side_by_side.parameters.items():
        assert torch.equal(again.parameters[name], parameter)  # to go on after a kill as if there had been none


def test_lanes_share_no_cast_of_a_weight(examples, threads):
    """Casts are kept for a step, and made without gradients where positions are selected: each lane must have its own."""
    selection = Selection(reference=one_layer_draft(), fraction=0.5)
    fields = {"threads": threads, "selection": selection, "uses_bf16": True}
    alone, of_one = stepped(examples, num_threads=1, **fields)
    for _ in range(3):
        side_by_side, of_two = stepped(examples, num_threads=2, **fields)
        assert of_two[-1].loss == pytest.approx(of_one[-1].loss, rel=0.02)
        for name, parameter in alone.parameters.items():
            torch.testing.assert_close(side_by_side.parameters[name], parameter, atol=0.01, rtol=0.01)


def test_scores_do_not_depend_on_the_lanes(examples, threads):
    made = trainer(micro_batch_tokens=16)
    made.uses_bf16 = False
    threads(1)
    alone = [score.alpha for score in made.score(examples)]
    asked = []
    threads(2)
    assert [score.alpha for score in made.score(examples, between=lambda: asked.append(1))] == pytest.approx(alone)
    assert len(asked) > 1
    assert LearningConfig().num_threads == 1  # beside serving there is one lane
