"""`drafts`, `learn` and `traces` beside a running server, as an operator uses them."""

import json
import time

import httpx
import pytest

from tests.e2e.in_process import livedraft
from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess
from tests.e2e.test_cli import assert_one_sentence


def ask(server, count, user="someone", first=0):
    for number in range(first, first + count):
        body = {"model": "m", "prompt": f"question {number}", "max_tokens": 64, "temperature": 0, "user": user}
        assert (
            httpx.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60).status_code == 200
        )


def wait_for(look, seconds=60):
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def shown(*arguments):
    result = livedraft(*arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.timeout(240)
def test_an_operator_looks_pauses_promotes_rolls_back_and_deletes(model_folder, tmp_path):
    state = tmp_path / "state"
    here = ("--state", state)
    with ServerProcess(
        model_folder, *here, "--served-model-name", "m", "--dtype", "float32", **TINY_ENVIRONMENT
    ) as server:
        ask(server, 12)
        ask(server, 4, user="private", first=100)
        wait_for(lambda: shown("learn", "status", *here, "--json")["trainer"].get("num_steps", 0) > 0)
        status = shown("learn", "status", *here, "--json")
        assert status["server_running"]
        assert status["traces"] == 16
        assert status["serving"]["serve_flops"] > 0
        assert livedraft("learn", "pause", *here).returncode == 0
        wait_for(lambda: shown("learn", "status", *here, "--json")["trainer"]["status"] == "paused")
        assert livedraft("learn", "resume", *here).returncode == 0
        first = shown("drafts", "list", *here, "--json")["drafts"][0]["id"]
        assert livedraft("learn", "now", *here).returncode == 0
        ask(server, 12, first=200)

        def is_decided():
            return any(row["alpha"] is not None for row in shown("drafts", "list", *here, "--json")["drafts"])

        wait_for(is_decided, 90)
        detail = shown("drafts", "show", first, *here)
        assert detail["manifest"]["parent"] is None
        assert livedraft("drafts", "promote", first, *here).returncode == 0
        wait_for(lambda: shown("learn", "status", *here, "--json")["serving"]["draft_version"] == first)
        assert_one_sentence(livedraft("drafts", "rollback", *here), "no earlier version")
        assert_one_sentence(livedraft("drafts", "promote", "v9", *here), "no version 'v9'")
        deleted = livedraft("traces", "delete", "--user", "private", *here)
        assert deleted.stdout.startswith("4 traces"), deleted.stdout + deleted.stderr
        listed = shown("traces", "list", *here, "--json", "--limit", 5)
        assert (listed["total"], len(listed["traces"])) == (24, 5)
        ask(server, 2, first=300)  # serving and learning go on after it
    assert_one_sentence(livedraft("drafts", "list", "--state", tmp_path / "nowhere"), "no livedraft state", "--state")
