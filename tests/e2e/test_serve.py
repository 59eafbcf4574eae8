"""`serve`, `chat`, `config show` and `bench serve` as a user runs them: start, banner, signals, errors."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess
from tests.e2e.test_cli import assert_one_sentence, livedraft

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}


def serve(model_folder, *options, **environment):
    return ServerProcess(model_folder, "--served-model-name", "m", *options, **TINY_ENVIRONMENT, **environment)


def test_the_banner_says_what_runs_and_its_curl_line_works(model_folder, tmp_path):
    state = tmp_path / "state"
    started = time.monotonic()
    with serve(model_folder, "--state", state, LIVEDRAFT_SERVER__STATUS_SECONDS="0") as server:
        loaded = re.search(r"loaded  in ([\d.]+) s\n", server.banner)
        assert 0.0 < float(loaded[1]) < time.monotonic() - started
        for word in ("m, 0 M parameters", "thread", "draft", "16 slots of 512 tokens", f"traces and drafts in {state}"):
            assert word in server.banner
        assert "off with --no-learn" in server.banner
        curl = server.banner.strip().splitlines()[-1]
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(answer.stdout)["choices"]
        assert server.stop() == 0
    assert all(line.endswith(" ...\n") for line in server.errors), server.errors  # what a start waits for
    assert any("Timing" in line for line in server.errors)
    assert (state / "livedraft.db").exists()


def test_no_learn_keeps_nothing(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with serve(model_folder, "--no-learn") as server:
        assert "off: nothing is stored" in server.banner
        assert httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=30).status_code == 200
    assert list(tmp_path.iterdir()) == []


def test_a_target_whose_family_cannot_learn_is_served_plainly_and_says_so(neox_folder, tmp_path):
    with serve(neox_folder, "--state", tmp_path / "state", "--dtype", "float32") as server:
        assert "this target's family has none; proposals from suffixes" in server.banner
        assert "only drafts of Llama, Qwen2 and Qwen3 targets learn" in server.banner
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=30)
        assert answer.status_code == 200


def test_settings_come_from_file_and_environment(model_folder, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[engine]\nmax_num_seqs = 3\n[server]\nmax_queue = 1\nper_request_metrics = true\n")
    with serve(model_folder, "--no-learn", "--config", file, LIVEDRAFT_ENGINE__MAX_MODEL_LEN="99") as server:
        assert "3 slots of 99 tokens" in server.banner
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=30).json()
        assert "speculative_decoding" in answer["metrics"]


def test_a_small_memory_budget_means_fewer_slots(model_folder):
    # 3 + 2 layers x 2 x 2 heads x 8 x 2 or 4 bytes x 512 tokens: under a third of a MiB a slot.
    with serve(model_folder, "--no-learn", "--dtype", "float32", LIVEDRAFT_ENGINE__KV_CACHE_GB="0.002") as server:
        slots = int(re.search(r"(\d+) slots of 512", server.banner)[1])
        assert 1 <= slots < 16
        assert httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=30).status_code == 200


def test_sigterm_drains_running_requests_finish_and_new_ones_are_refused(model_folder):
    with serve(model_folder, "--no-learn") as server:
        long = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True}
        texts = []

        def stream():
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=long, timeout=60) as answer:
                texts.extend(answer.iter_text())

        thread = threading.Thread(target=stream)
        with httpx.Client(base_url=server.url, timeout=30) as kept:
            assert kept.get("/health").status_code == 200
            thread.start()
            while not texts:
                time.sleep(0.005)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            health = kept.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = kept.post("/v1/chat/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        thread.join(timeout=30)
        whole = "".join(texts)
        assert whole.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in whole
        assert server.process.wait(timeout=30) == 0


@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_a_second_signal_or_ctrl_c_does_not_wait(model_folder, signals):
    with serve(model_folder, "--no-learn") as server:
        texts = []
        body = BODY | {"max_tokens": 480, "ignore_eos": True, "stream": True, "n": 8}

        def stream():
            try:
                with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
                    texts.extend(answer.iter_text())
            except httpx.HTTPError:
                texts.append("cut")

        thread = threading.Thread(target=stream)
        thread.start()
        while not texts:
            time.sleep(0.005)
        for sig in signals:
            server.process.send_signal(sig)
            time.sleep(0.2)
        assert server.process.wait(timeout=15) == 0
        thread.join(timeout=15)
        assert not [line for line in server.errors if "Traceback" in line]


def test_what_does_not_start_is_one_sentence(model_folder, tmp_path):
    assert_one_sentence(livedraft("serve", tmp_path / "nowhere", "--port", 0, "--no-learn"), "There is no model at")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_sentence(
            livedraft("serve", model_folder, "--port", port, "--no-learn"), f"127.0.0.1:{port}", "--port"
        )
    assert_one_sentence(livedraft("serve", model_folder, "--port", 70000), "port")
    assert_one_sentence(livedraft("serve", model_folder, "--config", tmp_path / "no.toml"), "not there")
    assert_one_sentence(livedraft("serve", model_folder, LIVEDRAFT_SERVER__PROT="1"), "Did you mean port?")
    result = livedraft(
        "serve", model_folder, "--no-learn", "--port", 0, "--dtype", "float32", LIVEDRAFT_ENGINE__KV_CACHE_GB="0.0001"
    )
    assert_one_sentence(result, "KV memory", "kv_cache_gb")


def test_config_show_prints_what_a_server_would_use(tmp_path):
    shown = json.loads(livedraft("config", "show", "--json", LIVEDRAFT_SERVER__PORT="1234").stdout)
    assert shown["server"]["port"] == 1234
    text = livedraft("config", "show", LIVEDRAFT_SERVER__API_KEYS="secret").stdout
    assert "secret" not in text
    file = tmp_path / "again.toml"
    file.write_text(livedraft("config", "show", LIVEDRAFT_SERVER__PORT="77").stdout)
    again = json.loads(livedraft("config", "show", "--json", "--config", file).stdout)
    assert again["server"]["port"] == 77


def chat(*arguments, lines):
    return subprocess.run(
        [sys.executable, "-m", "livedraft", "chat", *map(str, arguments)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_chat_with_a_server_and_with_a_model_loaded_here_say_the_same(model_folder):
    options = ("--max-tokens", 12, "--stats")
    with serve(model_folder, "--no-learn", "--dtype", "float32", "--api-key", "k", "--per-request-metrics") as server:
        attached = chat("--url", server.url, "--api-key", "k", *options, lines=["hello", "", "more"])
        refused = chat("--url", server.url, "--api-key", "wrong", lines=["hello"])
    local = chat(model_folder, "--dtype", "float32", *options, lines=["hello", "", "more"])
    assert attached.returncode == local.returncode == 0, local.stderr
    assert attached.stdout == local.stdout
    assert attached.stdout
    for result in (attached, local):
        assert len(re.findall(r"\[\d+ tokens, .*draft ", result.stderr)) == 2
    assert_one_sentence(refused, "401", "API key")
    assert_one_sentence(chat("--url", "http://127.0.0.1:9", lines=["x"]), "No server answers", "livedraft serve")


def test_bench_serve_prints_a_row_a_concurrency(model_folder):
    result = livedraft(
        "bench", "serve", "--model", model_folder, "--concurrency", "1,3", "--rounds", 2, "--max-tokens", 6, "--json"
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        for name in ("plain_tokens_per_second", "speculative_tokens_per_second", "direct_tokens_per_second"):
            assert row[name] > 0
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert 0 < row["itl_ms_p50"] <= row["itl_ms_p99"]
    assert_one_sentence(livedraft("bench", "serve", "--concurrency", "1,x"), "--concurrency")
