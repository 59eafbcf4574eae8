"""The dashboard's record of the past: bounded, exact in its sums, kept over a restart."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livedraft.server.history import FILE_NAME, History, Point


def point(at, *, tokens=10, drafted=8, accepted=4, **more):
    curves = {"default": [3, drafted, accepted]} if drafted else {}
    return Point(start=at - 1, end=at, busy_seconds=0.5, num_tokens=tokens, curves=curves, **more)


def totals(points):
    tokens = sum(one.num_tokens for one in points)
    counts = [sum(one.curves.get("default", [0, 0, 0])[i] for one in points) for i in range(3)]
    return tokens, counts, round(sum(one.busy_seconds for one in points), 6)


@given(st.lists(st.floats(1, 100_000), min_size=1, max_size=120))
def test_it_stays_bounded_and_loses_no_count(gaps):
    added, at = [], 1e9
    history = History(max_points=20)
    for gap in gaps:
        at += gap
        added.append(point(at, tokens=int(gap) % 50))
        history.add(added[-1])
    assert len(history.points) <= 20
    assert totals(history.points) == totals(added)
    assert [one.end for one in history.points] == sorted(one.end for one in history.points)
    assert history.points[-1].end == at


def test_what_is_recent_stays_fine_and_what_is_old_gets_coarse():
    history = History(max_points=300)
    for second in range(5_000):
        history.add(point(1e9 + second))
    spans = [one.end - one.start for one in history.points]
    assert spans[-10:] == [1.0] * 10
    assert 16 < spans[0] < 500  # coarse, and still a curve


def test_a_pause_without_requests_stays_a_gap():
    history = History(max_points=50)
    for start in (0, 50_000):
        for second in range(1_000):
            history.add(point(1e9 + start + second))
    longest = max(history.points, key=lambda one: one.end - one.start)
    assert longest.end - longest.start < 2_000


def test_joining_keeps_the_last_gauge_and_adds_the_rest():
    first, second = point(10, alpha=0.3, loss=2.0), point(11, alpha=None, loss=1.5)
    second.curves["suffix"] = [1, 4, 4]
    joined = first.joined(second)
    assert (joined.start, joined.end, joined.alpha, joined.loss) == (9, 11, 0.3, 1.5)
    assert joined.curves == {"default": [6, 16, 8], "suffix": [1, 4, 4]}
    assert first.curves == {"default": [3, 8, 4]}  # untouched


def test_recent_reaches_back_for_enough_evidence_and_no_further():
    history = History([point(t, accepted=0 if t < 90 else 8) for t in range(1, 101)])
    recent = history.recent(40, 1000)
    assert recent.curves["default"] == [15, 40, 40]
    assert history.recent(10**6, 3.0).busy_seconds == 3.0
    assert History().recent(1, 1) is None
    idle = History([point(1), point(500, tokens=0, drafted=0, loss=1.0)])
    assert idle.recent(1, 1).end == 1  # training alone is no traffic


def test_it_survives_a_restart_whole(tmp_path):
    history = History([point(t, alpha=0.5) for t in range(1, 5)])
    History.save(tmp_path, [dict(vars(one)) for one in history.points])
    assert History.load(tmp_path).points == history.points
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", "[3]", '[{"start": 1}]', '[{"start": "a", "end": 2}]', '[{"start": 1, "end": 2, "evil": 3}]',
     '[{"start": 1, "end": 2, "curves": {"default": [1]}}]', '[{"start": 2, "end": 1}]'],
)  # fmt: skip
def test_a_damaged_file_costs_the_picture_only(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    assert History.load(tmp_path).points == []


def test_a_disk_that_does_not_take_it_is_no_error(tmp_path, caplog):
    History.save(tmp_path / "gone", [])
    assert "could not be written" in caplog.text


def test_a_full_history_is_small_on_the_wire_and_shrinks_quickly():
    history = History()
    started = time.perf_counter()
    for second in range(2_000):
        history.add(point(1e9 + second, alpha=0.51234567, loss=1.23456789))
    assert (time.perf_counter() - started) / 2_000 < 0.01
    assert len(json.dumps([one.as_json() for one in history.points])) < 150_000
