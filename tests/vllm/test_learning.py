"""The whole loop with SmolLM2-135M-Instruct behind a real vLLM: serve, tap, learn, gate, swap; over HTTP, as a user has it."""

import asyncio
import os
import signal
import time

import httpx
import pytest

from livedraft.bench.demo_stream import plant_shop_prompts
from livedraft.drafts.registry import Registry
from livedraft.learning.store import TraceStore
from livedraft.records import DEFAULT_ROUTE
from tests.e2e.server_process import ServerProcess

NUM_REQUESTS, NUM_TOKENS, CONCURRENCY, BURST = 150, 64, 8, 15
ADMIN = {"Authorization": "Bearer boss"}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def served(vllm_python, smollm2_path, tmp_path_factory):
    state = tmp_path_factory.mktemp("learning") / "state"
    arguments = (
        smollm2_path,
        "--python",
        vllm_python,
        "--state",
        state,
        "--admin-key",
        "boss",
        "--served-model-name",
        "m",
    )
    options = ("--max-model-len", "512", "--num-speculative-tokens", "3", "--verbose")
    with ServerProcess(
        *arguments,
        *options,
        verb=("vllm", "serve"),
        LIVEDRAFT_ENGINE__KV_CACHE_GB="0.25",
        LIVEDRAFT_LEARNING__LEVEL="eager",
    ) as server:
        yield server, state


async def _ask(url: str, prompts: list[str], **fields) -> list[str]:
    """At most CONCURRENCY at once."""
    limit = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(prompt: str) -> str:
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
            }
            async with limit:
                answer = await client.post("/v1/chat/completions", json={**body, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def _counter(url: str, name: str) -> float:
    lines = [
        line for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines() if line.startswith(f"vllm:{name}")
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_draft_learns_what_vllm_serves_and_is_swapped_in(served):
    """Alpha with the version in service when each request came, before it was learnt from: 0.2 above the start after 150
    requests of 64 tokens."""
    server, state = served
    prompts = plant_shop_prompts(NUM_REQUESTS, seed=0)
    store, registry = TraceStore(state), Registry(state)
    first = registry.in_service(DEFAULT_ROUTE)
    alphas: list[float] = []
    for start in range(0, NUM_REQUESTS, BURST):
        asyncio.run(_ask(server.url, prompts[start : start + BURST]))
        alphas = _scored(store, start + BURST)  # meanwhile the trainer has the machine: traffic comes in bursts
        if start and _mean(alphas[-BURST:]) >= _mean(alphas[:BURST]) + 0.2:
            break
    events = httpx.get(f"{server.url}/admin/events?limit=1000", headers=ADMIN, timeout=30).json()["events"]
    swaps = [event for event in events if event["event"] == "replica_swapped"]
    tapped = httpx.get(f"{server.url}/metrics", timeout=30).text
    num_bytes = next(
        float(line.split()[-1]) for line in tapped.splitlines() if line.startswith("livedraft:tap_bytes_total{")
    )
    num_tokens = sum(row.num_output_tokens for row in store.rows())
    print(
        f"alpha {_mean(alphas[:BURST]):.3f} -> {_mean(alphas[-BURST:]):.3f} over {len(alphas)} requests, {len(swaps)} swaps"
    )
    print(f"paused {[event['paused_seconds'] for event in swaps]} s, {num_bytes / num_tokens:.0f} bytes a token")
    assert _mean(alphas[-BURST:]) >= _mean(alphas[:BURST]) + 0.2
    assert len(store.rows()) == len(alphas) <= NUM_REQUESTS
    assert swaps and registry.in_service(DEFAULT_ROUTE).id != first.id
    assert any(row.is_held_out for row in store.rows())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _scored(store: TraceStore, count: int) -> list[float]:
    """Once so many requests have their alpha, and a moment later."""
    deadline = time.monotonic() + 60
    while True:
        alphas = [row.alpha for row in store.rows() if row.alpha is not None]
        if len(alphas) >= count:
            time.sleep(3.0)
            return alphas
        assert time.monotonic() < deadline, f"{len(alphas)} of {count} requests were tapped and scored"
        time.sleep(0.2)


def test_what_is_not_to_be_stored_is_not(served):
    server, state = served
    before = len(TraceStore(state).rows())
    prompts = plant_shop_prompts(4, seed=5)
    asyncio.run(_ask(server.url, prompts[:2], store=False))
    httpx.post(
        f"{server.url}/v1/completions", headers={"x-livedraft-store": "false"}, timeout=60,
        json={"model": "m", "prompt": prompts[2], "max_tokens": 8},
    )  # fmt: skip
    asyncio.run(_ask(server.url, prompts[3:]))
    deadline = time.monotonic() + 20
    while len(TraceStore(state).rows()) == before and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(1.0)
    assert len(TraceStore(state).rows()) == before + 1


def test_serving_goes_on_when_the_trainer_is_killed(served):
    server, _ = served
    status = httpx.get(f"{server.url}/admin/learn", headers=ADMIN, timeout=30).json()
    os.kill(status["trainer"]["pid"], signal.SIGKILL)
    answers = asyncio.run(_ask(server.url, plant_shop_prompts(4, seed=6)))
    assert all(answers)
    deadline = time.monotonic() + 60
    while True:
        fresh = httpx.get(f"{server.url}/admin/learn", headers=ADMIN, timeout=30).json()["trainer"]
        if fresh.get("pid") != status["trainer"]["pid"]:
            return
        assert time.monotonic() < deadline, "the trainer did not come back"
        time.sleep(0.5)


def test_vllms_endpoints_are_all_there(served):
    server, _ = served
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ready"}
        assert client.get("/v1/models").json()["data"][0]["id"] == "m"
        count = client.post("/tokenize", json={"model": "m", "prompt": "three rivers"}).json()["count"]
        assert count > 0
        bad = client.post("/v1/chat/completions", json={"model": "m", "messages": "what"})
        assert bad.status_code == 400
        sampled = {"model": "m", "prompt": "Once", "max_tokens": 8, "temperature": 0.8, "n": 2}
        assert len(client.post("/v1/completions", json=sampled).json()["choices"]) == 2
    assert _counter(server.url, "spec_decode_num_drafts_total") > 0
