"""Random requests of sixteen clients, some of whom leave and some of whom send nonsense: nothing leaks, nothing is lost, and
no error is anyone's but the client's."""

import asyncio
import json
import random
import re
import time

import httpx
import pytest

from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess

NUM_CLIENTS = 16
OPTIONS = [
    {"temperature": 0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 30, "min_p": 0.02},
    {"seed": 4, "temperature": 1.0},
    {"n": 2},
    {"n": 4, "seed": 9},
    {"stop": ["a", "\x08", "e "]},
    {"stop_token_ids": [3, 200]},
    {"presence_penalty": 1.0, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"257": 3, "70": -100}},
    {"ignore_eos": True},
    {"response_format": {"type": "json_object"}},
    {"prediction": {"type": "content", "content": "some words that may come"}},
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 4, "store": False},
    {"user": "someone", "metadata": {"a": "b"}},
]
MALFORMED = [
    b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", b'{"model": "m", "messages": []}', b'{"messages": [{"role": "user"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100000}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999": 1}}',
]  # fmt: skip


class Tally:
    def __init__(self):
        self.num_answers = self.num_refused = self.num_left = 0
        self.faults = []


async def client(url, chance, tally, until):
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while time.monotonic() < until and not tally.faults:
            kind = chance.random()
            if kind < 0.1:
                await send_nonsense(http, chance, tally)
            elif kind < 0.3:
                await leave_early(http, body_of(chance) | {"stream": True, "max_tokens": 200}, chance, tally)
            elif kind < 0.65:
                await stream_to_the_end(http, body_of(chance), tally)
            else:
                await answer_whole(http, body_of(chance), tally)


def body_of(chance):
    shared = "You are a helpful assistant of a plant shop. " * 2
    content = chance.choice(["hi", "日本語 🌈", "x" * chance.randint(1, 120), "tell me " * chance.randint(1, 10)])
    options = {}
    for one in chance.sample(OPTIONS, 2):
        options |= one
    if "response_format" in options:
        options.pop("ignore_eos", None)
    messages = [{"role": "system", "content": shared}, {"role": "user", "content": content}]
    return {"model": "m", "messages": messages, "max_tokens": chance.randint(1, 40), "logprobs": True, **options}


async def send_nonsense(http, chance, tally):
    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/chat/completions", content=chance.choice(MALFORMED), headers=headers)
    tally.num_refused += 1
    if not 400 <= answer.status_code < 500 or "error" not in answer.json():
        tally.faults.append(("nonsense", answer.status_code, answer.text))


async def leave_early(http, body, chance, tally):
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            tally.faults.append(("left", answer.status_code, await answer.aread(), body))
            return
        left = chance.randint(0, 6)
        async for _ in answer.aiter_lines():
            left -= 1
            if left < 0:
                break
    tally.num_left += 1


async def answer_whole(http, body, tally):
    answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        tally.faults.append(("whole", answer.status_code, answer.text, body))
        return
    whole = answer.json()
    check(body, whole["usage"], [choice["logprobs"]["content"] for choice in whole["choices"]], tally)


async def stream_to_the_end(http, body, tally):
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        tally.faults.append(("stream", answer.status_code, answer.text, body))
        return
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    if events[-1] != "[DONE]":
        tally.faults.append(("stream ended early", events[-1]))
        return
    chunks = [json.loads(event) for event in events[:-1]]
    rows = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            rows.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get("content", []))
    if chunks[-1].get("usage") is None:
        tally.faults.append(("no usage", chunks[-1]))
        return
    check(body, chunks[-1]["usage"], list(rows.values()), tally)


def check(body, usage, rows, tally):
    tally.num_answers += 1
    visible = sum(len(one) for one in rows)
    if usage["completion_tokens"] != visible or len(rows) != body.get("n", 1):
        tally.faults.append(("usage is not the visible tokens", usage, visible))
    if any(len(one) > body["max_tokens"] for one in rows):
        tally.faults.append(("past max_tokens", body))


def metric(text, name):
    return sum(float(value) for value in re.findall(rf"^livedraft:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def soak(server, seconds, sample_memory_after):
    tally = Tally()
    until = time.monotonic() + seconds
    clients = [
        asyncio.ensure_future(client(server.url, random.Random(number), tally, until)) for number in range(NUM_CLIENTS)
    ]
    await asyncio.sleep(sample_memory_after)
    early = server.memory_bytes
    await asyncio.gather(*clients)
    return tally, early, server.memory_bytes


def run_soak(model_folder, seconds, sample_memory_after, tmp_path, *options):
    arguments = (
        "--served-model-name",
        "m",
        "--dtype",
        "float32",
        "--max-model-len",
        512,
        "--max-num-seqs",
        12,
        *options,
    )
    with ServerProcess(model_folder, *arguments, **TINY_ENVIRONMENT) as server:
        tally, early, late = asyncio.run(soak(server, seconds, sample_memory_after))
        assert tally.faults == []
        assert tally.num_answers > seconds
        assert tally.num_refused
        assert tally.num_left
        deadline = time.monotonic() + 20
        while metric(text := httpx.get(f"{server.url}/metrics").text, "num_requests_running"):
            assert time.monotonic() < deadline, "a slot leaked"
            time.sleep(0.1)
        assert metric(text, "num_requests_waiting") == 0
        drafted = metric(text, "spec_decode_num_draft_tokens_total")
        assert 0 < metric(text, "spec_decode_num_accepted_tokens_total") <= drafted
        assert httpx.get(f"{server.url}/health").status_code == 200
        alone = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "m", "prompt": "hi", "temperature": 0, "max_tokens": 5},
            timeout=60,
        )
        assert alone.json()["usage"]["completion_tokens"] == 5
        assert server.stop() == 0
        assert not [line for line in server.errors if "Traceback" in line], server.errors
        return early, late


@pytest.mark.timeout(180)
def test_a_short_soak(model_folder, tmp_path):
    run_soak(model_folder, 20, 10, tmp_path, "--no-learn")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_of_soak_with_learning_on(model_folder, tmp_path):
    early, late = run_soak(model_folder, 600, 180, tmp_path, "--state", tmp_path / "state")
    assert late <= 1.05 * early, (early, late)
