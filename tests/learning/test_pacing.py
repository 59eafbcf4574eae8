"""How training gives way to serving, with a clock that stands still."""

import pytest

from livedraft.learning import pacing as room
from livedraft.learning.pacing import Pacing
from livedraft.learning.process import open_yield_flag


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(room.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(room.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def pacing(state, level="gentle", has_had_its_share=lambda _seconds: False):
    return Pacing(state, level, has_had_its_share)


def test_it_steps_aside_between_micro_batches_while_serving_is_busy(tmp_path, clock, monkeypatch):
    made, serving = pacing(tmp_path, "on"), open_yield_flag(tmp_path)
    serving[0] = 1
    monkeypatch.setattr(
        room.time, "sleep", lambda seconds: (clock.sleep(seconds), serving.__setitem__(0, clock.now < 100.025))
    )
    made.step_aside()
    assert clock.now == pytest.approx(100.03)
    made.step_aside()
    assert clock.now == pytest.approx(100.03)


@pytest.mark.parametrize(("level", "longest"), [("gentle", 0.2), ("on", 0.5), ("eager", 0.0)])
def test_the_level_says_how_long_it_steps_aside(tmp_path, clock, level, longest):
    open_yield_flag(tmp_path)[0] = 1
    pacing(tmp_path, level).step_aside()
    assert clock.now - 100 == pytest.approx(longest, abs=0.02)


def test_requests_come_for_a_while_after_one_was_seen_and_then_less_is_done_at_a_time(tmp_path, clock):
    made, serving = pacing(tmp_path), open_yield_flag(tmp_path)
    assert made.seconds_since_busy() == float("inf")
    assert (made.is_lively, made.scored_of, made.most_evidence) == (False, 1, 400)
    serving[0] = 1
    assert made.seconds_since_busy() == 0
    serving[0] = 0
    clock.now += 4.9
    assert (made.is_lively, made.scored_of, made.most_evidence) == (True, 8, 64)
    clock.now += 0.2
    assert (made.is_lively, made.scored_of, made.most_evidence) == (False, 1, 400)


def test_what_is_timed_is_without_the_pauses(tmp_path, clock):
    made = pacing(tmp_path, "on")
    open_yield_flag(tmp_path)[0] = 1
    with made.timed():
        clock.now += 2.0
        made.step_aside()
        clock.now += 1.0
    assert made.train_seconds == pytest.approx(3.0)
    assert clock.now == pytest.approx(103.5, abs=0.02)


def test_it_asks_whether_training_has_had_its_share_with_the_seconds_since_requests_ran(tmp_path, clock):
    asked = []
    made = pacing(tmp_path, has_had_its_share=lambda seconds: asked.append(seconds) or len(asked) > 1)
    open_yield_flag(tmp_path)[0] = 1
    assert not made.rests()
    assert not made.is_resting
    assert made.rests()
    assert made.is_resting
    assert asked == [0.0, 0.0]
