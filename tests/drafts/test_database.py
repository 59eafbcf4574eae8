import time

import pytest

from livedraft.drafts import database as room
from livedraft.drafts.database import (
    DATABASE_NAME,
    open_database,
    read_controls,
    read_events,
    record_events,
    set_control,
    set_damaged_database_aside,
    write_status,
)  # fmt: skip
from livedraft.records import UserError


def event(number):
    return {"event": "tick", "time": float(number), "number": number}


def test_events_come_back_newest_last_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MAX_EVENTS", 5)
    record_events(tmp_path, [])
    for number in range(8):
        record_events(tmp_path, [event(number)])
    found = read_events(tmp_path)
    assert [one["number"] for one in found] == [3, 4, 5, 6, 7]
    assert [one["number"] for one in read_events(tmp_path, after_id=found[-2]["id"])] == [7]
    assert [one["number"] for one in read_events(tmp_path, limit=2)] == [6, 7]


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, None])
def test_a_damaged_database_is_kept_aside_and_a_fresh_one_takes_its_place(tmp_path, content):
    write_status(tmp_path, "trainer", {"x": 1})
    assert set_damaged_database_aside(tmp_path) is None
    path = tmp_path / DATABASE_NAME
    with open_database(tmp_path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    old = path.read_bytes()
    path.write_bytes(content if content is not None else old[:100] + b"\xff" * (len(old) - 100))
    aside = set_damaged_database_aside(tmp_path)
    assert aside is not None
    assert aside.exists()
    set_control(tmp_path, "paused", 1)
    assert read_controls(tmp_path)["paused"] == 1


def test_no_database_is_nothing_wrong(tmp_path):
    assert set_damaged_database_aside(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UserError, match="cannot be used"):
        record_events(file / "state", [event(1)])


def test_a_lock_is_waited_for(tmp_path):
    with open_database(tmp_path) as database:
        database.execute("CREATE TABLE x (y INTEGER)")
    started = time.monotonic()
    record_events(tmp_path, [event(1)])
    assert time.monotonic() - started < 5
