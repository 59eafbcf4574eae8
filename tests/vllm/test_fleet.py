"""Two real vLLM servers behind the public one, tiny models in float32: swaps under load, canaries, losses."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
import torch

from livedraft.config import SpeculationConfig
from livedraft.drafts.database import read_events
from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import draft_from_model, save_draft
from livedraft.integrations.vllm.drafts import exported, first_version, read_target
from livedraft.integrations.vllm.launch import Environment, LaunchConfig, VllmProcess, free_port, write_inside_part
from livedraft.models.load import load_model
from livedraft.records import DEFAULT_ROUTE, DraftVersion
from tests.e2e.server_process import ServerProcess
from tests.vllm.conftest import CONFIG

ADMIN = {"Authorization": "Bearer boss"}
NUM_STREAMS, NUM_TOKENS = 8, 220
PROMPTS = [f"{n} {'word ' * (n + 1)}" for n in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def fleet(vllm_python, models, tmp_path_factory):
    """(server, registry): both replicas begin with the bad draft."""
    state = tmp_path_factory.mktemp("fleet") / "state"
    arguments = (
        models["target"], "--python", vllm_python, "--state", state, "--draft", models["bad"], "--replicas", 2, "--admin-key",
        "boss", "--no-learn", "--served-model-name", "tiny", "--verbose",
    )  # fmt: skip
    passed_on = ("--", "--dtype", "float32", "--max-num-seqs", "16", "--no-enable-prefix-caching")
    with ServerProcess(
        *arguments, verb=("vllm", "serve"), passed_on=passed_on, LIVEDRAFT_ENGINE__KV_CACHE_GB="0.125"
    ) as server:
        _until(lambda: _phases(server) == ["ready", "ready"], 120)
        yield server, Registry(state)


def _phases(server) -> list[str]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("livedraft:replica_up{")]
    return ["ready" if line.endswith(" 1.0") else "down" for line in lines]


def _versions(server) -> list[str]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("livedraft:replica_up{")]
    return [line.split('version="')[1].split('"')[0] for line in lines]


def _until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.2)


def _publish(registry: Registry, folder, status: str) -> DraftVersion:
    """A whole model as the next version."""
    serving = registry.in_service(DEFAULT_ROUTE)
    draft = draft_from_model(load_model(folder, torch.float32), CONFIG.vocabulary_size)
    version = DraftVersion(
        id=new_version_id(len(registry.versions())), route=DEFAULT_ROUTE, parent=serving.id, sha256="",
        target_fingerprint=serving.target_fingerprint, tokenizer_fingerprint=serving.tokenizer_fingerprint,
        num_layers=draft.num_layers, vocabulary_size=draft.vocabulary_size, created_at=time.time(), num_requests_seen=1,
    )  # fmt: skip
    return registry.publish(lambda path: save_draft(draft, path), version, status=status)


async def _stream(client: httpx.AsyncClient, prompt: str) -> tuple[str, float]:
    """(text, longest wait between two chunks)."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, longest, last = "", 0.0, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            longest, last = max(longest, now - (last or now)), now
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += chunk["choices"][0]["text"]
    return text, longest


def _streams(server, meanwhile=None) -> tuple[list[str], float]:
    """Eight at once; `meanwhile` is called, in a thread, once they run, and until it is done they are asked for again."""

    async def job():
        if meanwhile is not None:
            await asyncio.sleep(0.5)
            await asyncio.to_thread(meanwhile)

    async def run():
        working, rounds = asyncio.create_task(job()), []
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            while not rounds or not working.done():
                rounds.append(await asyncio.gather(*(_stream(client, prompt) for prompt in PROMPTS)))
        await working
        return rounds

    rounds = asyncio.run(run())
    texts = [[text for text, _ in found] for found in rounds]
    assert texts == [texts[0]] * len(texts)
    return texts[0], max(wait for found in rounds for _, wait in found)


def _acceptance(server) -> tuple[float, float]:
    """(accepted, drafted) of all replicas."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text

    def total(name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}_total{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    return total("spec_decode_num_accepted_tokens"), total("spec_decode_num_draft_tokens")


def _rate(server, work) -> float:
    before = _acceptance(server)
    work()
    after = _acceptance(server)
    return (after[0] - before[0]) / (after[1] - before[1])


def test_a_swap_under_eight_streams_changes_no_text_and_makes_acceptance_jump(fleet, models):
    server, registry = fleet
    texts, _ = _streams(server)
    before = _rate(server, lambda: _streams(server))
    good = _publish(registry, models["good"], "imported")

    def promote():
        answer = httpx.post(f"{server.url}/admin/drafts/{good.id}/promote", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        _until(lambda: _versions(server) == [good.id, good.id], 30)

    again, longest = _streams(server, promote)
    assert again == texts
    assert longest <= 1.0
    after = _rate(server, lambda: _streams(server))
    assert before < 0.1 and after > 0.9
    paused = [
        event["paused_seconds"]
        for event in read_events(registry.state, limit=1000)
        if event["event"] == "replica_swapped"
    ]
    assert len(paused) == 2 and max(paused) < 1.0


def test_a_bad_canary_stops_at_one_replica_and_is_rolled_back(fleet, models):
    server, registry = fleet
    serving = registry.in_service(DEFAULT_ROUTE).id
    bad = _publish(registry, models["bad"], "candidate")
    registry.start_canary(bad.id, {"parent_alpha": 0.95, "alpha": 0.99})
    _until(lambda: sorted(_versions(server)) == sorted([serving, bad.id]), 30)

    def is_decided() -> bool:
        assert bad.id in _versions(server) or registry.version(bad.id)["status"] != "canary"
        assert _versions(server) != [bad.id, bad.id]
        _streams(server)
        return registry.version(bad.id)["status"] != "canary"

    _until(is_decided, 120)
    assert registry.version(bad.id)["status"] == "rolled_back"
    assert registry.in_service(DEFAULT_ROUTE).id == serving
    _until(lambda: _versions(server) == [serving, serving], 30)


def test_a_good_canary_is_served_by_both(fleet, models):
    server, registry = fleet
    good = _publish(registry, models["good"], "candidate")
    registry.start_canary(good.id, {"parent_alpha": 0.9, "alpha": 0.95})
    _until(lambda: good.id in _versions(server), 30)

    def is_served() -> bool:
        _streams(server)
        return _versions(server) == [good.id, good.id]

    _until(is_served, 120)
    assert registry.in_service(DEFAULT_ROUTE).id == good.id


def test_a_killed_replica_costs_its_own_answers_alone_and_comes_back_with_the_version_in_service(fleet):
    server, registry = fleet
    texts, _ = _streams(server)
    victim = int((registry.state / "vllm" / "replica-0.pid").read_text())
    os.killpg(victim, signal.SIGKILL)
    for _ in range(3):
        again, _ = _streams(server)
        assert again == texts
    _until(lambda: _phases(server) == ["ready", "ready"], 120)
    assert _versions(server) == [registry.in_service(DEFAULT_ROUTE).id] * 2
    assert int((registry.state / "vllm" / "replica-0.pid").read_text()) != victim


def test_what_changes_the_server_is_not_public(fleet):
    server, _ = fleet
    for path in (
        "/collective_rpc",
        "/pause",
        "/v1/../pause",
        "/v1/%2e%2e/pause",
        "/update_weights",
        "/reset_prefix_cache",
    ):
        assert httpx.post(server.url + path, json={"method": "livedraft_report"}).status_code == 404, path
    assert httpx.post(f"{server.url}/replica/traces", content=b"").status_code == 401


def test_after_a_kill_of_the_parent_the_next_start_ends_what_it_left(vllm_python, models, tmp_path):
    """And a parent that ends in good order leaves nothing."""
    arguments = (
        models["target"],
        "--python",
        vllm_python,
        "--state",
        tmp_path,
        "--draft",
        models["good"],
        "--no-learn",
    )
    marker = tmp_path / "vllm" / "replica-0.pid"
    with ServerProcess(*arguments, verb=("vllm", "serve"), LIVEDRAFT_ENGINE__KV_CACHE_GB="0.125") as server:
        left = int(marker.read_text())
        server.stop(signal.SIGKILL)
    os.kill(left, 0)  # it runs on, and nobody can reach it
    with ServerProcess(*arguments, verb=("vllm", "serve"), LIVEDRAFT_ENGINE__KV_CACHE_GB="0.125") as server:
        fresh = int(marker.read_text())
        assert fresh != left and not _is_alive(left) and _is_alive(fresh)
        assert server.stop() == 0
    assert not _is_alive(fresh)


def test_a_server_started_elsewhere_is_attached_fetches_its_drafts_by_http_and_is_left_as_it_was(
    vllm_python, models, tmp_path
):
    state = tmp_path / "state"
    registry, speculation = Registry(state), SpeculationConfig()
    target = read_target(models["target"], speculation)
    first = first_version(registry, target, str(models["bad"]), speculation)
    config = LaunchConfig(
        environment=Environment(python=vllm_python, version="0.32.0", is_cpu=True), target=models["target"], served_name="tiny",
        inside_part=write_inside_part(tmp_path / "inside"), num_speculative_tokens=3, max_model_len=512,
        kv_cache_bytes=2**27,
    )  # fmt: skip
    port = free_port()
    draft = exported(registry, first.id, target).folder
    process = VllmProcess(config, port=port, draft=draft, method="draft_model", log=tmp_path / "vllm.log")
    try:
        url = f"http://127.0.0.1:{port}"
        arguments = (
            models["target"],
            "--attach",
            url,
            "--state",
            state,
            "--no-learn",
            "--admin-key",
            "boss",
            "--served-model-name",
            "tiny",
        )
        with ServerProcess(*arguments, verb=("vllm", "serve")) as server:
            assert _versions(server) == [first.id]  # whatever it had before
            good = _publish(registry, models["good"], "imported")
            assert httpx.post(f"{server.url}/admin/drafts/{good.id}/promote", headers=ADMIN).status_code == 200
            _until(lambda: _versions(server) == [good.id], 60)
            assert _rate(server, lambda: _streams(server)) > 0.9
        assert httpx.get(f"{url}/health").status_code == 200
    finally:
        process.end(at_once=True)


def _is_alive(pid: int) -> bool:
    """A process that ended under another parent may stay as a zombie where nobody reaps."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
