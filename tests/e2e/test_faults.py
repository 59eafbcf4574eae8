"""Kills, full disks, damage: serving goes on, nothing that counted is lost, and what happened is said."""

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import threading
import time

import httpx
import numpy as np
import pytest

from livedraft import LLM, SamplingParams
from livedraft.config import LearningConfig
from livedraft.drafts.database import DATABASE_NAME, read_events, read_status
from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import save_draft
from livedraft.events import Events
from livedraft.learning.capture import conversation_key, load_secret
from livedraft.learning.store import TraceStore
from livedraft.records import DraftVersion
from livedraft.tokenizer import load_tokenizer
from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess

ROUTE = "default"


def serve_tiny(model_folder, state, *more, **options):
    return ServerProcess(
        model_folder,
        "--state",
        state,
        "--served-model-name",
        "m",
        "--dtype",
        "float32",
        *more,
        **TINY_ENVIRONMENT,
        **options,
    )


def ask(url, number, max_tokens=48):
    body = {
        "model": "m",
        "prompt": f"question {number}",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30)


def wait_for(look, seconds=60):
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


def add_canary(registry, number):
    """A copy of the version in service that passed the gate, for the watch to decide on while it is killed."""
    parent = registry.in_service(ROUTE)
    weights = registry.load(parent)
    version = dataclasses.replace(parent, id=new_version_id(number), parent=parent.id)
    made = registry.publish(lambda path: save_draft(weights, path), version)
    registry.start_canary(made.id, {"alpha": 0.5, "parent_alpha": 0.05})


def assert_sound(state):
    """Every row's trace can be read, exactly one version serves, its weights are whole, and no version was forgotten."""
    store, registry = TraceStore(state), Registry(state)
    for row in store.rows(limit=-1):
        assert store.read(row) is not None, row
    serving = [row for row in registry.versions() if row["status"] == "in_service"]
    assert len(serving) == 1
    registry.load(DraftVersion(**registry.manifest(serving[0]["id"])))
    folders = {path.parent.name for path in registry.drafts_folder.glob("*/manifest.json")}
    assert folders <= {row["id"] for row in registry.versions()} | {f for f in folders if ".damaged" in f}
    return serving[0]["id"]


def kill_round(model_folder, state, number, chance, promoted):
    registry = Registry(state)
    who = chance.choice(["server", "trainer", "both"])
    with serve_tiny(model_folder, state) as server:
        status = httpx.get(f"{server.url}/health", timeout=10).json()["status"]
        assert status == "ready"
        promoted.append(assert_sound(state))
        add_canary(registry, number)
        stop = threading.Event()

        def keep_asking():
            n = 1000 * number
            while not stop.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    ask(server.url, n)
                n += 1

        asking = threading.Thread(target=keep_asking)
        asking.start()
        time.sleep(chance.uniform(0.05, 3.0))
        if who != "server":
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(read_status(state, "trainer")["pid"], signal.SIGKILL)
        if who == "trainer":
            time.sleep(0.3)
            assert ask(server.url, 1).status_code == 200  # serving goes on without it
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        stop.set()
        asking.join()


def kill_rounds(model_folder, state, count, seed):
    chance = random.Random(seed)
    promoted: list[str] = []
    with serve_tiny(model_folder, state) as server:
        assert ask(server.url, 0).status_code == 200
    for number in range(1, count + 1):
        kill_round(model_folder, state, number, chance, promoted)
    with serve_tiny(model_folder, state) as server:
        serving = assert_sound(state)
        assert ask(server.url, 0).status_code == 200
        for name in set(promoted):
            assert Registry(state).version(name)["status"] in ("in_service", "retired")
        wait_for(lambda: read_status(state, "serving").get("draft_version") == serving)
    assert TraceStore(state).rows(limit=-1)
    assert len(set(promoted)) > 1  # the rounds did change what serves


@pytest.mark.timeout(180)
def test_kills_at_random_moments(model_folder, tmp_path):
    kill_rounds(model_folder, tmp_path / "state", 5, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_fifty_kills_at_random_moments(model_folder, tmp_path):
    kill_rounds(model_folder, tmp_path / "state", 50, seed=int(time.time()))


@pytest.mark.timeout(180)
def test_a_disk_that_fills_up_costs_traces_and_no_answer(model_folder, tmp_path):
    """No file of server and trainer may grow any more: what a full disk does, also to root."""
    state = tmp_path / "state"
    with serve_tiny(model_folder, state, "--verbose") as server:
        assert ask(server.url, 0).status_code == 200
        wait_for(lambda: read_status(state, "trainer") and TraceStore(state).rows())
        stored = len(TraceStore(state).rows())
        for pid in (server.process.pid, read_status(state, "trainer")["pid"]):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for number in range(10):
            assert ask(server.url, number).status_code == 200
        wait_for(lambda: any("traces_dropped" in line for line in server.errors))
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        assert httpx.get(f"{server.url}/metrics", timeout=10).status_code == 200
        assert len(TraceStore(state).rows()) == stored
        # There is room again: traces are kept from the next one on.
        for pid in (server.process.pid, read_status(state, "trainer")["pid"]):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert ask(server.url, 50).status_code == 200
        wait_for(lambda: len(TraceStore(state).rows()) > stored)
        assert server.stop() == 0
    assert "traces_dropped" in names(read_events(state, limit=1000))
    assert_sound(state)


@pytest.mark.timeout(180)
def test_a_user_who_is_deleted_while_asking_is_in_no_file_any_more(model_folder, tmp_path):
    """Text, ids in 32 and in 64 bits, and the client's key, over the whole state folder: with the trainer's checkpoint, what
    was running, and what the server keeps when it ends. The others stay."""
    state, secret = tmp_path / "state", "the secret of mrs weatherbottom"
    with serve_tiny(model_folder, state, "--learn", "eager", "--admin-key", "boss") as server:

        def say(prompt, user, max_tokens=24):
            body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "user": user}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        for number in range(12):
            assert say(f"{secret}, part {number}", "mrs").status_code == 200
            assert say(f"what others ask, part {number}", "others").status_code == 200
        wait_for(lambda: read_status(state, "trainer").get("num_trained", 0) >= 4)
        wait_for(lambda: list(state.glob("*checkpoint*")))
        running = threading.Thread(target=say, args=(f"{secret}, the last part", "mrs", 400))
        running.start()
        time.sleep(0.2)
        answer = httpx.delete(
            f"{server.url}/admin/traces", params={"user": "mrs"}, headers={"Authorization": "Bearer boss"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        running.join()
        assert say("one more of the others", "others").status_code == 200
        wait_for(lambda: len(TraceStore(state).rows()) == 13)
        wait_for(lambda: read_status(state, "trainer").get("status") == "waiting for traces")
        assert server.stop() == 0
    needles = [secret.encode(), conversation_key(["mrs"], load_secret(state)).encode()]
    ids = load_tokenizer(model_folder).encode(secret)
    needles += [np.array(ids, dtype=kind).tobytes() for kind in (np.int32, np.int64)]
    files = [path for path in state.rglob("*") if path.is_file()]
    found = [(path.name, needle) for path in files for needle in needles if needle in path.read_bytes()]
    assert found == []
    assert any(path.name.endswith(".safetensors") for path in files)


# --- damage, in this process ----------------------------------------------------------------------------------------


def learning(model_folder, state, seen, **settings):
    events = Events()
    events.subscribe(seen.append)
    return LLM(
        str(model_folder), state=state, learn=True, dtype="float32", num_threads=1, events=events,
        learning=LearningConfig(**settings),
    )  # fmt: skip


def names(seen):
    return [event["event"] for event in seen]


@pytest.fixture
def two_versions(model_folder, tmp_path):
    """A state whose second version is in service."""
    state = tmp_path / "state"
    with learning(model_folder, state, []):
        registry = Registry(state)
        first = registry.in_service(ROUTE)
        second = dataclasses.replace(first, id=new_version_id(1), parent=first.id)
        weights = registry.load(first)
        registry.publish(lambda path: save_draft(weights, path), second)
        registry.serve(second.id, ROUTE, {})
    return state, first.id, second.id


def test_a_damaged_version_gives_way_to_the_last_good_one_at_start(model_folder, two_versions):
    state, first, second = two_versions
    path = Registry(state).weights_path(second)
    path.write_bytes(path.read_bytes()[:-100])
    seen = []
    with learning(model_folder, state, seen) as llm:
        assert llm.engine.draft_version == first
        assert len(llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    assert [e["version"] for e in seen if e["event"] == "draft_refused"] == [second]
    assert Registry(state).version(second)["status"] == "set_aside"
    assert Registry(state).in_service(ROUTE).id == first


def test_a_candidate_trained_with_another_tokenizer_never_drafts(model_folder, tmp_path):
    state, seen = tmp_path / "state", []
    with learning(model_folder, state, seen) as llm:
        registry = Registry(state)
        first = registry.in_service(ROUTE)
        weights = registry.load(first)
        foreign = dataclasses.replace(
            first, id=new_version_id(1), parent=first.id, tokenizer_fingerprint="another"
        )  # fmt: skip
        foreign = registry.publish(lambda path: save_draft(weights, path), foreign)
        registry.start_canary(foreign.id, {"alpha": 0.9, "parent_alpha": 0.1})
        wait_for(lambda: registry.version(foreign.id)["status"] == "set_aside")
        llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
        assert llm.engine.draft_version == first.id
    refused = [event for event in seen if event["event"] == "draft_refused"]
    assert [event["version"] for event in refused] == [foreign.id]
    assert "another tokenizer" in refused[0]["reason"]


def test_no_readable_version_at_all_starts_from_an_untrained_one(model_folder, two_versions):
    state, first, second = two_versions
    for version in (first, second):
        Registry(state).weights_path(version).write_bytes(b"nothing")
    seen = []
    with learning(model_folder, state, seen) as llm:
        assert llm.engine.draft_version not in (first, second)
        assert Registry(state).in_service(ROUTE).id == llm.engine.draft_version
    assert names(seen).count("draft_refused") == 2


def test_a_damaged_database_is_rebuilt_and_the_same_version_serves(model_folder, two_versions):
    state, _, second = two_versions
    with learning(model_folder, state, []) as llm:
        llm.generate(["a", "b"], SamplingParams(max_tokens=8, ignore_eos=True))
    (state / DATABASE_NAME).write_bytes(b"what was a database" * 50)
    seen = []
    with learning(model_folder, state, seen) as llm:
        assert llm.engine.draft_version == second
        assert len(TraceStore(state).rows()) == 2
    assert {"database_damaged", "versions_found", "traces_found"} <= set(names(seen))
    assert "database_damaged" in names(read_events(state))


def test_a_folder_that_cannot_be_written_while_serving_drops_traces_and_says_so(model_folder, tmp_path):
    state, seen = tmp_path / "state", []
    with learning(model_folder, state, seen) as llm:
        llm.generate("one", SamplingParams(max_tokens=4, ignore_eos=True))
        llm.capture.close()
        llm.capture = type(llm.capture)(TraceStore(state), llm.events)
        llm.engine.trace_sink = llm.capture.offer
        shutil.rmtree(state / "traces")
        (state / "traces").write_text("no folder any more")
        output = llm.generate("two", SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output[0].token_ids) == 4
        wait_for(lambda: "traces_dropped" in names(seen))
        assert llm.capture.num_dropped == 1
        (state / "traces").unlink()
        llm.generate("three", SamplingParams(max_tokens=4, ignore_eos=True))
    assert [row.num_output_tokens for row in TraceStore(state).rows()][-1] == 4


def test_memory_only_leaves_no_trace_behind(model_folder, tmp_path):
    state = tmp_path / "state"
    with learning(model_folder, state, [], memory_only=True) as llm:
        llm.generate("a secret", SamplingParams(max_tokens=8, ignore_eos=True))
        wait_for(lambda: TraceStore(state).rows())
        in_memory = (state / "traces").resolve()
        assert list(in_memory.glob("shard-*"))
    assert not in_memory.exists()
    assert not TraceStore(state).rows()


def test_a_redactor_that_is_not_there_stops_the_start(model_folder, tmp_path):
    from livedraft.records import UserError

    with pytest.raises(UserError, match="cannot be imported"):
        learning(model_folder, tmp_path / "state", [], redact="no_such_module:f")
    with learning(model_folder, tmp_path / "state", []) as llm:  # and gives the folder's lock back
        assert llm.engine.draft is not None
