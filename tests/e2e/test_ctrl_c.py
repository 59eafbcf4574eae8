"""Ctrl-C, as a terminal sends it: to the command and to every process it has started. Nothing is left behind, nothing is
broken, no traceback, exit code 130 (0 for `serve`, which is meant to run until somebody stops it)."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from livedraft.drafts.database import read_events
from livedraft.drafts.registry import lock_state
from tests.e2e.in_process import livedraft
from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess
from tests.e2e.test_state_cli import ask, shown, wait_for


def _as_in_a_terminal():
    """Tests that a shell runs in the background inherit a SIGINT that is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


pytestmark = [pytest.mark.timeout(240), pytest.mark.long]


@contextmanager
def running(*arguments, **environment):
    """In a process group of its own, as a shell starts it; gives the process and its output so far, line by line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "livedraft", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **TINY_ENVIRONMENT, **environment}, start_new_session=True, preexec_fn=_as_in_a_terminal,
    )  # fmt: skip
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(timeout=10)
        process.stdout.close()


def press_ctrl_c(process, seconds=30):
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(timeout=seconds)


def processes_that_name(path):
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in cmdline.read_bytes():
                found.append(cmdline.parent.name)
        except OSError:
            continue
    return found


def test_the_demo_leaves_nothing_behind(model_folder, tmp_path):
    options = ("--model", model_folder, "--requests", 40, "--max-tokens", 16)
    with running("demo", *options, TMPDIR=str(tmp_path)) as (process, lines):
        wait_for(lambda: processes_that_name(tmp_path) and any("trainer: " in line for line in lines), 150)
        assert press_ctrl_c(process) == 130
        wait_for(lambda: not processes_that_name(tmp_path), 10)
    assert not [line for line in lines if "Traceback" in line]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("livedraft")] == []


def test_a_server_is_stopped_and_starts_again_as_if_nothing_had_been(model_folder, tmp_path):
    state = tmp_path / "state"
    options = ("--served-model-name", "m", "--dtype", "float32", "--state", state, "--port", 0)
    with running("serve", model_folder, *options) as (process, lines):
        wait_for(lambda: any(line.startswith("curl ") for line in lines))
        url = next(word for line in lines for word in line.split() if word.startswith("http://")).removesuffix("/v1")
        wait_for(lambda: shown("learn", "status", "--state", state, "--json")["trainer"].get("status"))
        body = {"model": "m", "prompt": "q", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(timeout=30) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            next(answer.iter_text())
            assert press_ctrl_c(process) == 0
    assert not [line for line in lines if "Traceback" in line], lines
    assert "Traceback" not in (state / "trainer.log").read_text()
    assert not processes_that_name(state)
    assert {event["event"] for event in read_events(state)} & {
        "trainer_died",
        "database_damaged",
        "round_failed",
    } == set()
    lock_state(state).close()
    with ServerProcess(model_folder, *options[:-2], **TINY_ENVIRONMENT) as server:
        ask(server, 2)
        assert server.stop() == 0


def test_an_import_keeps_what_it_has_judged(model_folder, tmp_path):
    state, file = tmp_path / "state", tmp_path / "records.jsonl"
    record = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer " * 30}]}
    count = 3000
    with file.open("w") as out:
        for number in range(count):
            record["messages"][0]["content"] = f"question {number}"
            out.write(json.dumps(record) + "\n")
    options = (file, "--state", state, "--model", model_folder, "--dtype", "float32")
    with running("traces", "import", *options) as (process, lines):
        wait_for(lambda: len(list((state / "traces").glob("*.safetensors"))) > 1)
        assert press_ctrl_c(process) == 130
    assert not [line for line in lines if "Traceback" in line], lines
    kept = shown("traces", "list", "--state", state, "--json")["total"]
    assert 0 < kept < count
    more = json.loads(livedraft("traces", "import", *options, "--limit", 5, "--json").stdout)
    assert more["num_traces"] == 5
    assert shown("traces", "list", "--state", state, "--json")["total"] == kept + 5


def test_a_distillation_goes_on_where_it_was(model_folder, tmp_path):
    rows = [{"turns": [f"question {number} of many"]} for number in range(400)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    options = ("--target", model_folder, "--out", out, "--draft-layers", 1, "--dtype", "float32", "--threads", 1,
               "--max-tokens", 16, "--epochs", 1, "--prompts", tmp_path / "prompts.jsonl", "--json")  # fmt: skip
    with running("distill", *options) as (process, lines):
        wait_for(lambda: list((out / "responses").glob("part-*.st")))
        assert press_ctrl_c(process) == 130
    assert not [line for line in lines if "Traceback" in line], lines
    assert not processes_that_name(out)
    kept = {part.name: part.stat().st_mtime_ns for part in (out / "responses").glob("part-*.st")}
    assert {path.suffix for path in (out / "responses").iterdir()} == {".st"}  # nothing half-written
    result = livedraft("distill", *options)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["num_train"] > 0
    now = {part.name: part.stat().st_mtime_ns for part in (out / "responses").glob("part-*.st")}
    assert kept.items() <= now.items()  # what was answered before was not asked again


def test_a_measurement_ends_without_a_word(model_folder, tmp_path):
    rows = [{"turns": [f"question {number}"]} for number in range(2000)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", tmp_path / "prompts.jsonl", "--model", model_folder, "--limit", 2000, "--max-tokens", 64)
    with running("bench", "speed", *options, TMPDIR=str(tmp_path)) as (process, lines):
        wait_for(lambda: any("Timing" in line for line in lines), 60)
        time.sleep(2.0)  # prompts are being answered
        assert process.poll() is None, lines
        assert press_ctrl_c(process) == 130
    assert not [line for line in lines if "Traceback" in line], lines
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")}  # torch's own cache
    assert left == {"prompts.jsonl"}


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path):
    slow = tmp_path / "typer.py"  # the first thing the command line imports
    slow.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n")
    with running("--version", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}") as (process, lines):
        assert process.wait(timeout=30) == 130
    assert lines == []


def test_a_download_leaves_no_half_file(tmp_path):
    with socket.socket() as silent:  # an index that never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        options = {"PIP_INDEX_URL": address, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}
        with running("pull", LIVEDRAFT_MODELS=str(tmp_path), PIP_CONFIG_FILE=os.devnull, **options) as (process, lines):
            connection = silent.accept()[0]  # pip waits for an answer now
            assert list(tmp_path.glob("pull-*"))
            assert press_ctrl_c(process) == 130
            connection.close()
    assert not [line for line in lines if "Traceback" in line], lines
    assert list(tmp_path.iterdir()) == []


def test_a_conversation_ends_at_once_while_it_waits_for_a_line(model_folder):
    with ServerProcess(model_folder, "--no-learn", **TINY_ENVIRONMENT) as server:
        pid, terminal = pty.fork()
        if pid == 0:
            _as_in_a_terminal()
            os.execv(sys.executable, [sys.executable, "-m", "livedraft", "chat", "--url", server.url])
        shown_text = b""
        deadline = time.monotonic() + 60
        while b"> " not in shown_text:
            assert time.monotonic() < deadline, shown_text
            if select.select([terminal], [], [], 0.2)[0]:
                shown_text += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert os.waitstatus_to_exitcode(ended[1]) == 130
        os.close(terminal)


def test_the_status_line_is_on_standard_error_while_requests_run(model_folder):
    with ServerProcess(
        model_folder, "--no-learn", LIVEDRAFT_SERVER__STATUS_SECONDS="0.2", **TINY_ENVIRONMENT
    ) as server:
        name = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
        body = {"model": name, "prompt": "q", "max_tokens": 100, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        wait_for(lambda: any("tokens/s | " in line and "learning off" in line for line in server.errors), 20)
        time.sleep(1.0)
        count = len(server.errors)
        time.sleep(1.0)
        assert len(server.errors) == count  # idle, so silent


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an older Python cannot start a process in a group of its own")
def test_the_trainer_is_not_in_the_terminals_group(model_folder, tmp_path):
    with ServerProcess(model_folder, "--state", tmp_path / "state", **TINY_ENVIRONMENT) as server:
        others = [int(pid) for pid in processes_that_name(tmp_path / "state") if int(pid) != server.process.pid]
        assert others
        assert all(os.getpgid(pid) != os.getpgid(server.process.pid) for pid in others)
        assert all(os.getsid(pid) == os.getsid(server.process.pid) for pid in others)
