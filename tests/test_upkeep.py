import dataclasses
import os

import pytest

from livedraft import upkeep as room
from livedraft.config import LearningConfig
from livedraft.drafts.database import read_events, read_status, set_control
from livedraft.events import Events
from livedraft.learning.store import Streams, TraceStore
from livedraft.records import UserError
from livedraft.speculation.suffix import Traffic
from livedraft.upkeep import Upkeep
from tests.learning.toy import served_traces


class Clock:
    def __init__(self):
        self.wall, self.steady = 1_000_000.0, 500.0

    def pass_by(self, seconds):
        self.wall += seconds
        self.steady += seconds

    def sleep(self, seconds):
        self.pass_by(seconds)

    def time(self):
        return self.wall

    def monotonic(self):
        return self.steady


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(room, "time", made)
    monkeypatch.setattr("livedraft.learning.store.time", made)
    return made


@pytest.fixture
def made(tmp_path, clock):
    events = Events()
    one = Upkeep(tmp_path, config=LearningConfig(max_trace_age_days=10.0), events=events)
    one.events, one.seen = events, []
    events.subscribe(one.seen.append)
    return one


def names(made):
    return [event["event"] for event in made.seen]


def test_traces_expire_by_age(made, clock, tmp_path):
    TraceStore(tmp_path).append(served_traces(2))
    clock.pass_by(9 * 86400)
    made.look()
    assert len(TraceStore(tmp_path).rows()) == 2
    clock.pass_by(2 * 86400)
    made.look()
    assert not TraceStore(tmp_path).rows()
    assert "traces_expired" in names(made)


@pytest.mark.parametrize("seconds", [100 * 86400.0, -100 * 86400.0])
def test_a_clock_that_is_set_deletes_nothing_for_an_hour(made, clock, tmp_path, seconds):
    TraceStore(tmp_path).append(served_traces(2))
    clock.wall += seconds
    made.look()
    clock.pass_by(60)
    made.look()
    assert len(TraceStore(tmp_path).rows()) == 2
    assert names(made).count("clock_jumped") == 1
    clock.wall -= seconds  # somebody sets it right
    for _ in range(4):
        clock.pass_by(1800)
        made.look()
    assert len(TraceStore(tmp_path).rows()) == 2


def test_shards_that_cannot_be_read_at_start_are_said(tmp_path, clock):
    store = TraceStore(tmp_path)
    store.append(served_traces(2))
    lost = store.folder / "shard-lost.safetensors"  # no rows: looked at at start
    lost.write_bytes(b"half of it")
    os.utime(lost, (0, 0))
    events = Events()
    seen = []
    events.subscribe(seen.append)
    made = Upkeep(tmp_path, config=LearningConfig(), events=events)
    assert [event["num_shards"] for event in seen if event["event"] == "shards_set_aside"] == [1]
    row = store.rows()[0]
    (store.folder / row.shard).write_bytes(b"half of it")
    made.read_texts(Streams(), Traffic(100), 100)
    assert [event["event"] for event in seen].count("shards_set_aside") == 2


def test_status_controls_and_events_reach_the_folder_and_the_engine(made, clock, tmp_path):
    forgotten = []
    made.start(forget_prefixes=lambda: forgotten.append(1), report=lambda: {"draft_version": "v1"})
    made.look()
    assert not forgotten
    assert read_status(tmp_path, "serving")["draft_version"] == "v1"
    set_control(tmp_path, "forget")
    made.events.emit("something", number=7)
    made.look()
    assert forgotten == [1]
    assert [event["number"] for event in read_events(tmp_path) if event["event"] == "something"] == [7]


def test_events_wait_for_a_disk_that_is_full(made, tmp_path, monkeypatch):
    right = room.record_events

    def full(state, events):
        raise UserError("no space")

    made.events.emit("first")
    monkeypatch.setattr(room, "record_events", full)
    made.keep_events()
    made.events.emit("second")
    monkeypatch.setattr(room, "record_events", right)
    made.keep_events()
    assert [event["event"] for event in read_events(tmp_path)][-2:] == ["first", "second"]


def test_what_a_crash_left_is_tidied_up_and_said(tmp_path):
    store = TraceStore(tmp_path)
    traces = [dataclasses.replace(t, arrived_at=123.0) for t in served_traces(2)]
    store.folder.mkdir(parents=True)
    store._write(traces, "shard-lost.safetensors")
    events, seen = Events(), []
    events.subscribe(seen.append)
    Upkeep(tmp_path, config=LearningConfig(), events=events)
    assert [event["event"] for event in seen] == ["traces_found"]
    assert len(store.rows()) == 2
