import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from livedraft.drafts.registry import open_database
from livedraft.events import Events
from livedraft.learning import capture as capture_room
from livedraft.learning.capture import Capture, conversation_key, load_secret, write_secret
from livedraft.learning.store import HELD_OUT_SHARE, TraceStore, is_held_out
from livedraft.records import UserError
from tests.learning.toy import served_traces


@pytest.fixture(scope="module")
def traces():
    keys = [conversation_key([n], b"secret") for n in range(6)]
    return [dataclasses.replace(t, conversation_key=key) for t, key in zip(served_traces(6), keys)]


def equal(one, other):
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        same = np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        assert same, field.name


def test_round_trip_of_every_field(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append(traces[:4])
    store.append(traces[4:])
    rows = TraceStore(tmp_path).rows()
    assert [row.request_id for row in rows] == [trace.request_id for trace in traces]
    reader = TraceStore(tmp_path)
    for row, trace in zip(rows, traces):
        equal(reader.read(row), trace)
        assert row.is_held_out == is_held_out(trace.conversation_key)
        assert row.num_output_tokens == len(trace.output_token_ids)
    assert store.rows(after_id=rows[3].id) == rows[4:]
    assert store.rows(route="other") == []


def test_alpha_is_recorded_beside_the_trace(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append(traces[:2])
    first, second = store.rows()
    store.record_alpha({first.id: (0.25, 0.5)})
    first, second = store.rows()
    assert (first.alpha, first.alpha_served) == (0.25, 0.5)
    assert second.alpha is None


def test_a_damaged_shard_is_set_aside_and_the_rest_stays(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append(traces[:2])
    store.append(traces[2:])
    first, *_ = store.rows()
    path = tmp_path / "traces" / first.shard
    path.write_bytes(path.read_bytes()[:100])
    assert TraceStore(tmp_path).read(first) is None
    assert path.with_suffix(".damaged").exists()
    left = store.rows()
    assert len(left) == 4
    assert TraceStore(tmp_path).read(left[0]) is not None


def test_kill_9_while_writing_leaves_whole_shards_and_their_rows(tmp_path):
    """A writer is killed at a random moment; afterwards every row's trace can be read and no temporary file is a shard."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from livedraft.learning.store import TraceStore
        from tests.learning.toy import served_traces
        traces = served_traces(4)
        store = TraceStore(Path(sys.argv[1]))
        print("ready", flush=True)
        while True:
            store.append(traces)
        """
    )
    for delay in (0.05, 0.2):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        threading.Event().wait(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = TraceStore(tmp_path)
        rows = store.rows()
        assert rows
        assert all(store.read(row) is not None for row in rows)
        store.append(served_traces(1))  # and the store goes on
    assert len(store.rows()) > 4


def test_one_conversation_is_on_one_side_and_the_share_is_a_tenth():
    keys = [conversation_key(["system", f"question {n}"], b"k") for n in range(3000)]
    share = sum(map(is_held_out, keys)) / 3000
    assert abs(share - 1 / HELD_OUT_SHARE) < 0.02
    assert conversation_key(["a"], b"k") == conversation_key(["a"], b"k") != conversation_key(["a"], b"other")
    assert not is_held_out("")


def test_the_key_is_made_once_and_private(tmp_path):
    assert load_secret(tmp_path) == load_secret(tmp_path)
    assert (tmp_path / "split.key").stat().st_mode & 0o077 == 0
    write_secret(tmp_path, b"fixed")
    assert load_secret(tmp_path) == b"fixed"


class SlowStore:
    """Holds the writer until released, as a slow disk does."""

    def __init__(self):
        self.release, self.written = threading.Event(), []

    def append(self, batch):
        self.release.wait(10)
        self.written += batch


def test_capture_never_blocks_and_counts_what_it_drops(monkeypatch, traces):
    monkeypatch.setattr(capture_room, "QUEUE_SIZE", 4)
    store = SlowStore()
    capture = Capture(store, Events())
    for _ in range(30):
        capture.offer(traces[0])
    assert capture.num_dropped >= 30 - 4 - capture_room.TRACES_PER_SHARD - 1
    store.release.set()
    capture.close()
    assert len(store.written) + capture.num_dropped == 30


def test_a_full_disk_drops_traces_with_an_event_and_serving_goes_on(traces):
    class FullDisk:
        def append(self, _batch):
            raise OSError(28, "No space left on device")

    seen, events = [], Events()
    events.subscribe(seen.append)
    capture = Capture(FullDisk(), events)
    capture.offer(traces[0])
    capture.close()
    assert seen[0]["event"] == "traces_dropped"
    assert "No space" in seen[0]["reason"]
    assert capture.num_dropped == 1


def test_another_schema_is_refused(tmp_path):
    with open_database(tmp_path) as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(UserError, match="another livedraft"):
        TraceStore(tmp_path).rows()
