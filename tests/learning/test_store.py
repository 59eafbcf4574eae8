import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from livedraft.drafts.database import open_database
from livedraft.events import Events
from livedraft.learning import capture as capture_room
from livedraft.learning.capture import Capture, conversation_key, load_secret, write_secret
from livedraft.learning.store import Streams, TraceStore, clear_memory, keep_in_memory
from livedraft.records import HELD_OUT_SHARE, UserError, is_held_out
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
    assert store.rows(streams=Streams(names=("other",), are_left_out=False)) == []


def test_alpha_is_recorded_beside_the_trace(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append(traces[:2])
    first, second = store.rows()
    store.record_alpha({first.id: (0.25, 0.5, False)})
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
    with pytest.raises(UserError, match="a newer livedraft"):
        TraceStore(tmp_path).rows()


def test_limits_remove_the_oldest_shards_with_their_rows(tmp_path, traces):
    store = TraceStore(tmp_path)
    for start in (0, 2, 4):
        store.append(traces[start : start + 2])
    size = next((tmp_path / "traces").glob("shard-*")).stat().st_size
    assert store.enforce_limits(max_bytes=10 * size, max_age_seconds=1e6) == 0
    assert store.enforce_limits(max_bytes=2.5 * size, max_age_seconds=1e6) == 2
    assert [row.request_id for row in store.rows()] == [trace.request_id for trace in traces[2:]]
    assert len(list((tmp_path / "traces").glob("shard-*"))) == 2
    with open_database(tmp_path) as database:
        database.execute("UPDATE traces SET created_at = created_at - 1000 WHERE id = ?", (store.rows()[0].id,))
        database.execute("UPDATE traces SET created_at = created_at - 1000 WHERE id = ?", (store.rows()[1].id,))
    assert store.enforce_limits(max_bytes=1e12, max_age_seconds=500) == 2
    assert [row.request_id for row in store.rows()] == [trace.request_id for trace in traces[4:]]


def test_a_deleted_client_is_nowhere_in_the_state_folder(tmp_path, traces):
    """Searched as text and as token ids in every file, in 32 and 64 bits; the others' traces stay as they were."""
    prompt, output = list(range(1000, 1012)), traces[1].output_token_ids
    private = dataclasses.replace(
        traces[1], client_key="a1" * 16, request_id="request-of-the-private-client", prompt_token_ids=prompt
    )
    store = TraceStore(tmp_path)
    store.append([traces[0], private, traces[2]])
    store.append([private])
    store.append(traces[3:5])
    (tmp_path / "traces" / "shard-old.damaged").write_bytes(np.array(prompt, dtype=np.int32).tobytes())
    assert store.delete_client("a1" * 16) == 2
    needles = [b"request-of-the-private-client", b"a1" * 16]
    needles += [np.array(prompt, dtype=kind).tobytes() for kind in (np.int32, np.int64)]
    found = [
        (path.name, needle[:20])
        for path in tmp_path.rglob("*")
        if path.is_file()
        for needle in needles
        if needle in path.read_bytes()
    ]
    assert found == []
    assert output  # what it said shares tokens with others; its prompt and names are what is searched
    left = TraceStore(tmp_path)
    for row, trace in zip(left.rows(), [traces[0], traces[2], *traces[3:5]], strict=True):
        equal(left.read(row), trace)


def test_what_arrived_before_a_deletion_is_not_stored_after_it(tmp_path, traces):
    """Requests that ran meanwhile, of that client alone; later ones of the same client are."""
    store, now = TraceStore(tmp_path), time.time()
    before = dataclasses.replace(traces[0], client_key="a1", request_id="before", arrived_at=now - 5)
    other = dataclasses.replace(traces[1], client_key="b2", request_id="other", arrived_at=now - 5)
    store._write([before], "shard-lost.safetensors")  # its rows were just being written
    os.utime(store.folder / "shard-lost.safetensors", (0, 0))
    store.delete_client("a1")
    after = dataclasses.replace(traces[2], client_key="a1", request_id="after", arrived_at=time.time() + 1)
    store.append([before, other, after])
    store.append([before])
    assert [row.request_id for row in store.rows()] == ["other", "after"]
    assert [store.read(row).request_id for row in store.rows()] == ["other", "after"]
    assert len(list(store.folder.iterdir())) == 1
    store.delete_all()
    store.append([before, other])
    assert not store.rows() and not list(store.folder.iterdir())


def test_a_deletion_while_the_clock_was_wrong_keeps_nothing_out_for_long(tmp_path, traces, monkeypatch):
    store, now = TraceStore(tmp_path), time.time()
    with monkeypatch.context() as wrong:
        wrong.setattr("livedraft.learning.store.time.time", lambda: now + 1e6)
        store.delete_all()
    store.append([dataclasses.replace(traces[0], arrived_at=now)])
    assert len(store.rows()) == 1


def test_a_state_of_the_first_schema_is_brought_up_to_date(tmp_path, traces):
    import sqlite3

    from livedraft.drafts.database import _MIGRATIONS

    connection = sqlite3.connect(tmp_path / "livedraft.db")
    connection.executescript(_MIGRATIONS[0])
    connection.execute("PRAGMA user_version=1")
    connection.execute(
        "INSERT INTO traces (request_id, route, created_at, is_held_out, shard, row, num_output_tokens, draft_version)"
        " VALUES ('old', 'default', 0, 0, 's', 0, 3, 'v')"
    )
    connection.commit()
    connection.close()
    store = TraceStore(tmp_path)
    store.append(traces[:1])
    assert [row.request_id for row in store.rows()] == ["old", traces[0].request_id]


# --- after a crash --------------------------------------------------------------------------------------------------


def test_a_shard_without_rows_is_found_again_and_a_half_written_one_goes(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append(traces[:2])
    store._write(traces[2:4], "shard-lost.safetensors")  # killed before its rows
    (store.folder / ".tmp-shard-half.safetensors").write_bytes(b"half")
    assert store.reconcile() == 2
    assert [row.request_id for row in store.rows()] == ["r0", "r1", "r2", "r3"]
    assert store.read(store.rows()[2]).output_token_ids == traces[2].output_token_ids
    assert not list(store.folder.glob(".tmp-*"))
    assert store.reconcile() == 0


def test_what_a_cut_short_deletion_left_is_not_found_again(tmp_path, traces):
    """Killed between the rewritten shard's rows and the old file's end: the deleted trace must not come back."""
    store = TraceStore(tmp_path)
    mine = [dataclasses.replace(t, client_key="ab" * 8 if n else "cd" * 8) for n, t in enumerate(traces[:3])]
    store.append(mine)
    (old,) = store.folder.glob("shard-*")
    content = old.read_bytes()
    assert store.delete_client("ab" * 8) == 2
    old.write_bytes(content)
    assert store.reconcile() == 0
    assert [row.request_id for row in store.rows()] == ["r0"]
    assert not old.exists()


def test_a_damaged_shard_is_set_aside_at_start_too(tmp_path):
    store = TraceStore(tmp_path)
    store.folder.mkdir()
    (store.folder / "shard-x.safetensors").write_bytes(b"no shard at all")
    assert store.reconcile() == 0
    assert [path.name for path in store.folder.iterdir()] == ["shard-x.damaged"]
    assert store.delete_all() == 0
    assert not list(store.folder.iterdir())


def test_deleting_a_client_whose_shard_is_damaged_leaves_nothing_of_it(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append([dataclasses.replace(traces[0], client_key="ab" * 8)])
    (shard,) = store.folder.glob("shard-*")
    shard.write_bytes(b"damaged, and nobody can say whose")
    assert store.delete_client("ab" * 8) == 1
    assert not list(store.folder.iterdir())
    assert not store.rows()


# --- traces in memory -----------------------------------------------------------------------------------------------


def test_traces_in_memory_never_touch_the_disk_and_are_gone_at_the_end(tmp_path, traces):
    state = tmp_path / "state"
    state.mkdir()
    keep_in_memory(state)
    store = TraceStore(state)
    store.append(traces[:2])
    assert len(store.rows()) == 2
    in_memory = store.folder.resolve()
    assert in_memory.is_relative_to("/dev/shm")
    assert in_memory.stat().st_mode & 0o077 == 0
    tokens = np.array(traces[0].output_token_ids, dtype=np.int32).tobytes()
    on_disk = [path for path in state.rglob("*") if path.is_file() and not path.resolve().is_relative_to("/dev/shm")]
    assert not any(tokens in path.read_bytes() for path in on_disk)
    keep_in_memory(state)  # as after a kill: what was left is gone
    assert not store.rows()
    store.append(traces[2:3])
    clear_memory(state)
    assert not in_memory.exists()
    assert not (state / "traces").exists()
    assert not TraceStore(state).rows()


def test_memory_only_does_not_hide_what_is_on_disk(tmp_path, traces):
    TraceStore(tmp_path).append(traces[:1])
    with pytest.raises(UserError, match="holds traces on disk"):
        keep_in_memory(tmp_path)
    clear_memory(tmp_path)  # of a state on disk it takes nothing
    assert len(TraceStore(tmp_path).rows()) == 1


def test_the_summary_keeps_prompts_seen_before_apart(tmp_path, traces):
    store = TraceStore(tmp_path)
    assert store.summary()["alpha_last_100"] is None
    store.append(traces[:3])
    first, second, third = store.rows()
    store.record_alpha({first.id: (0.2, 0.0, False), second.id: (0.4, 0.0, False), third.id: (0.9, 0.0, True)})
    summary = store.summary()
    assert summary["traces"] == 3
    assert summary["alpha_last_100"] == pytest.approx(0.5)
    assert summary["alpha_new_prompts"] == pytest.approx(0.3)
    assert summary["alpha_seen_prompts"] == pytest.approx(0.9)


def test_a_deletion_reaches_shards_whose_rows_were_never_written(tmp_path, traces):
    """The writer was killed between the two; later nothing of the user may be found again."""
    store = TraceStore(tmp_path)
    mine = [dataclasses.replace(t, client_key="ab" * 8 if n else "cd" * 8) for n, t in enumerate(traces[:3])]
    store.folder.mkdir(parents=True)
    store._write(mine, "shard-lost.safetensors")
    long_ago = time.time() - 60
    os.utime(store.folder / "shard-lost.safetensors", (long_ago, long_ago))
    assert store.delete_client("ab" * 8) == 2
    assert store.reconcile() == 0
    assert [row.request_id for row in store.rows()] == ["r0"]


def test_rows_that_cannot_be_written_take_their_shard_along(tmp_path, traces, monkeypatch):
    store = TraceStore(tmp_path)
    monkeypatch.setattr(store, "_add_rows", lambda *_, **__: (x for x in ()).throw(UserError("full")))
    with pytest.raises(UserError):
        store.append(traces[:2])
    assert not list(store.folder.iterdir())


def test_two_deletions_at_once_leave_nothing_of_either(tmp_path, traces):
    store = TraceStore(tmp_path)
    store.append([dataclasses.replace(t, client_key=f"{n:016x}") for n, t in enumerate(traces)])
    threads = [threading.Thread(target=TraceStore(tmp_path).delete_client, args=(f"{n:016x}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row.request_id for row in store.rows()) == ["r4", "r5"]
    assert store.reconcile() == 0
    assert len(store.rows()) == 2
