"""The real training process beside a real engine, on a tiny model."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from livedraft import LLM, SamplingParams
from livedraft.config import LearningConfig
from livedraft.drafts.database import read_status
from livedraft.events import Events
from livedraft.learning.store import TraceStore
from livedraft.records import UserError

SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True)


def prompts(count, first=0):
    return [f"question number {n}, about {n % 7} things" for n in range(first, first + count)]


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("did not happen in time")


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def learning(model_folder, tmp_path, events):
    seen = []
    events.subscribe(seen.append)
    with LLM(
        str(model_folder),
        state=tmp_path / "state",
        learn=True,
        dtype="float32",
        num_threads=1,
        events=events,
        learning=LearningConfig(level="on", traces_per_chunk=2, traces_per_candidate=8),
    ) as llm:
        llm.seen = seen
        yield llm


def names(llm):
    return [event["event"] for event in llm.seen]


def test_it_learns_promotes_and_swaps_while_the_output_stays_the_same(learning, model_folder):
    llm = learning
    outputs, first = [], 0
    while "draft_swapped" not in names(llm):
        assert first < 1000, llm.registry.versions()
        outputs += llm.generate(prompts(16, first), SAMPLING)
        first += 16
        time.sleep(0.3)
    outputs += llm.generate(prompts(16, first), SAMPLING)
    promoted = {row["id"]: row["decision"] for row in llm.registry.versions() if (row["decision"] or {}).get("promote")}
    decision = promoted[llm.engine.draft_version]  # what serves is what the gate let through
    assert decision["candidate_alpha"] > decision["parent_alpha"]
    plain = LLM(str(model_folder), draft="none", dtype="float32", num_threads=1)
    expected = plain.generate(prompts(first + 16), SAMPLING)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    store = TraceStore(llm.state)
    wait_for(lambda: [row.alpha is not None for row in store.rows()] == [True] * len(outputs))
    rows = store.rows()
    assert rows[0].draft_version != rows[-1].draft_version


def test_killing_the_trainer_leaves_serving_running_and_says_so(learning):
    llm = learning
    llm.generate(prompts(2), SAMPLING)
    wait_for(lambda: read_status(llm.state, "trainer"))
    pid = llm.trainer.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "trainer_died" in names(llm), 10)
    assert next(e for e in llm.seen if e["event"] == "trainer_died")["exit_code"] == -signal.SIGKILL
    assert len(llm.generate(prompts(4), SAMPLING)) == 4
    wait_for(lambda: llm.trainer.pid not in (None, pid), 20)  # restarted with back-off


def test_store_false_is_not_stored(learning):
    learning.generate(prompts(3), SAMPLING, store=False)
    learning.generate(prompts(1, first=50), SAMPLING)
    wait_for(lambda: TraceStore(learning.state).rows())
    time.sleep(0.7)
    assert len(TraceStore(learning.state).rows()) == 1


def test_a_state_folder_has_one_owner(learning, model_folder):
    with pytest.raises(UserError, match="Another livedraft is using"):
        LLM(str(model_folder), state=learning.state)


def test_the_trainer_ends_with_its_parent(model_folder, tmp_path):
    """Even when the parent is killed: the pipe on the worker's standard input closes."""
    script = textwrap.dedent(
        """
        import sys, time
        from livedraft import LLM
        llm = LLM(sys.argv[1], state=sys.argv[2], learn=True, num_threads=1)
        while llm.trainer.pid is None:
            time.sleep(0.05)
        time.sleep(1.0)
        print(llm.trainer.pid, flush=True)
        time.sleep(60)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(model_folder), str(tmp_path / "state")], stdout=subprocess.PIPE
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def is_gone():
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().split()[2] == "Z"
        except FileNotFoundError:
            return True

    wait_for(is_gone, 20)


def test_a_plain_script_without_a_main_guard_learns(model_folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from livedraft import LLM, SamplingParams
            llm = LLM({str(model_folder)!r}, state={str(tmp_path / "state")!r}, learn=True, num_threads=1)
            print(len(llm.generate(["one", "two"], SamplingParams(max_tokens=4, ignore_eos=True))))
            llm.close()
            """
        )
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "2\n"


def test_next_start_takes_the_version_in_service(model_folder, tmp_path):
    with LLM(str(model_folder), state=tmp_path / "s", learn=True, num_threads=1) as llm:
        version = llm.engine.draft_version
    with LLM(str(model_folder), state=tmp_path / "s", num_threads=1) as llm:
        assert llm.engine.draft_version == version
        assert llm.trainer is None
