"""The HTTP layer by itself, over a scripted backend: errors, limits, keys, streams, clients that go away."""

import asyncio
import json
import logging
import threading
import time

import pytest

from livedraft.config import ServerConfig
from livedraft.llm import LLM
from livedraft.records import Update
from livedraft.server.local import serve_llm
from livedraft.server.openai_api import chat_job
from livedraft.server.schemas import ChatCompletionRequest
from livedraft.settings import Settings
from tests.server.scripted import CHAT, COUNTS, scripted
from tests.serving import InProcess, joined


@pytest.fixture
def client():
    with InProcess(scripted("héllo 🌈 world")) as made:
        yield made


def chat_scope():
    """For tests that play the socket themselves; one dict a request, because the application writes into it."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    return error


def test_an_answer_whole_and_streamed(client):
    whole = client.complete(CHAT)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("héllo 🌈 world", "stop")
    assert whole.body["object"] == "chat.completion"
    assert whole.body["id"].startswith("chatcmpl-")
    assert whole.body["choices"][0]["message"]["role"] == "assistant"
    assert whole.usage["completion_tokens"] == len("héllo 🌈 world".encode()) + 1
    stream = client.complete(CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert stream.choices == whole.choices
    assert stream.usage == whole.usage
    assert stream.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in stream.chunks[:-1])
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in stream.chunks)
    unasked = client.complete(CHAT | {"stream": True})
    assert not any("usage" in chunk for chunk in unasked.chunks)


def drafted_rounds(tokenizer):
    """A round of each kind, one that is trimmed inside the draft, a character split over two tokens, an end of sequence."""
    ids = tokenizer.encode_text("abcdefgh é")
    first, second = ids[-2:]
    return [
        Update(token_ids=tuple(ids[0:1]), num_drafted=0),
        Update(token_ids=tuple(ids[1:4]), num_drafted=4, num_accepted=2, proposer="v1"),
        Update(token_ids=tuple(ids[4:7]), num_drafted=2, num_accepted=2, proposer="suffix"),
        Update(token_ids=(ids[7], ids[8], first), num_drafted=3, num_accepted=3, proposer="v1"),
        Update(
            token_ids=(second, 257), num_drafted=2, num_accepted=1, proposer="v1", finish_reason="stop", counts=COUNTS
        ),
    ]


def test_a_stream_says_where_each_token_comes_from_when_asked():
    served = scripted("")
    served.backend.rounds = drafted_rounds(served.tokenizer)
    with InProcess(served) as client:
        asked = client.complete(CHAT | {"stream": True, "return_token_kinds": True})
        unasked = client.complete(CHAT | {"stream": True})
        assert asked.choices == unasked.choices
        assert asked.choices[0].text == "abcdefgh é"
        assert "token_kinds" not in json.dumps(unasked.chunks)
        kinds = [c["choices"][0]["token_kinds"] for c in asked.chunks if "token_kinds" in c["choices"][0]]
        assert [(one["num_drafted"], one["proposer"]) for one in kinds] == [
            (0, None), (4, "v1"), (2, "suffix"), (3, "v1"), (2, "v1")
        ]  # fmt: skip
        assert [one["tokens"] for one in kinds] == [
            [["a", "plain"]],
            [["b", "accepted"], ["c", "accepted"], ["d", "recovered"]],
            [["e", "accepted"], ["f", "accepted"], ["g", "bonus"]],
            [["h", "accepted"], [" ", "accepted"], ["", "accepted"]],
            [["é", "accepted"]],
        ]


def test_a_backend_that_does_not_say_leaves_the_kinds_unknown(client):
    reply = client.complete(CHAT | {"stream": True, "return_token_kinds": True})
    assert reply.choices[0].text == "héllo 🌈 world"
    kinds = {
        kind for chunk in reply.chunks for _, kind in chunk["choices"][0].get("token_kinds", {"tokens": []})["tokens"]
    }
    assert kinds == {"unknown"}


def test_a_held_back_end_has_no_token_of_its_own():
    served = scripted("")
    ids = served.tokenizer.encode_text("ab")
    served.backend.rounds = [
        Update(token_ids=(ids[0],), num_drafted=0),
        Update(
            token_ids=(ids[1],), num_drafted=1, num_accepted=1, proposer="v1", finish_reason="length", counts=COUNTS
        ),
    ]
    with InProcess(served) as client:
        reply = client.complete(CHAT | {"stream": True, "return_token_kinds": True, "stop": ["bc"]})
        last = [c["choices"][0]["token_kinds"] for c in reply.chunks if "token_kinds" in c["choices"][0]][-1]
        assert last["tokens"] == [["", "accepted"], ["b", "held"]]
        assert reply.choices[0].text == "ab"


def test_completions_and_echo(client):
    body = {"model": "script", "prompt": "Once"}
    assert client.complete(body).choices[0].text == "héllo 🌈 world"
    for stream in ({}, {"stream": True}):
        assert client.complete(body | {"echo": True} | stream).choices[0].text == "Oncehéllo 🌈 world"
        assert client.complete(body | {"prompt": ["Once"]} | stream).choices[0].text == "héllo 🌈 world"
        assert (
            client.complete(body | {"prompt": [65, 66], "echo": True} | stream).choices[0].text[2:] == "héllo 🌈 world"
        )


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "lie in"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "lie in"),
        ({"n": 0}, "n", "greater"),
        ({"n": 17}, "n", "less"),
        ({"n": 2.5}, "n", "integer"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role", "'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "text",
        ),
        ({"stop": ""}, "stop", "at least 1"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"0000000000005": 1}}, "logit_bias", "token id"),
        ({"foo-bar": 1}, "foo-bar", "foo-bar: this option is not supported"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
        ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "[0.01, 10]"),
        ({"top_logprobs": 3}, None, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream_options": {"include_usage": True}}, None, "stream: true"),
        ({"return_token_kinds": True}, None, "needs stream: true"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, None, "differ"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"functions": []}, "functions", "not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "True"),
        ({"audio": {}}, "audio", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "takes no tools"),
        ({"tool_choice": "required"}, "tool_choice", "auto"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
            "Invalid type",
        ),
        ({"metadata": {"a": 5}}, "metadata.a", "string"),
        ({"seed": 2**64}, "seed", "less"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens", "32"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "prompt", "longer than the script"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
        ({"model": "\udfff"}, None, "surrogate"),
        ({"metadata": {"\ud83d": "x"}}, None, "surrogate"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(client, more, param, words):
    content = json.dumps(CHAT | more)  # ASCII: httpx's own encoder takes no half characters
    response = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert client.server.num_open == 0
    assert client.server.served.backend.requests == []


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"messages": [0] * 200_000},
        CHAT | {"messages": [{"role": "user", "content": [0] * 200_000}]},
        CHAT | {f"field{n}": 1 for n in range(100_000)},
        CHAT | {"metadata": {f"field{n}": 1 for n in range(100_000)}},
        CHAT | {"messages": [{"role": "user"}] * 5_000},
        CHAT | {"stop": ["a"] * 200_000},
        {"model": "script", "prompt": [[]] * 200_000},
        {"model": "script", "prompt": [1] * 100_000 + ["x"]},
        {"model": "script", "prompt": "x" * 3_000_000},
    ],
    ids=range(9),
)
def test_a_huge_wrong_body_is_refused_quickly(client, body):
    """A million wrong items must not become a million errors made on the event loop."""
    started = time.perf_counter()
    answer = client.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert error_of(answer, 400)
    assert len(answer.content) < 1000
    assert time.perf_counter() - started < 3  # 10 to 60 s before lists failed fast


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9999991},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "number", "multipleOf": 10**9}}}]},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_or_end_alone(client, schema):
    body = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    started = time.perf_counter()
    answer = client.post("/v1/chat/completions", body)
    if answer.status_code != 200:  # some are read; then the engine's own test shows that they fail alone
        assert error_of(answer, 400)["param"] == "response_format"
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("prompt", [[-1], [4294967301], [10**30], [258]])
@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_out_of_range_are_refused(model_folder, prompt, echo):
    with InProcess(lambda: serve_llm(LLM(str(model_folder), num_threads=1), Settings())) as real:
        body = {"model": real.server.served.name, "prompt": prompt, "echo": echo}
        assert "outside 0..257" in error_of(real.post("/v1/completions", body), 400)["message"]


def test_metrics_answer_while_the_database_does_not(model_folder, tmp_path):
    llm = LLM(str(model_folder), state=tmp_path, learn=True, num_threads=1)
    with InProcess(lambda: serve_llm(llm, Settings())) as real:
        (tmp_path / "livedraft.db").write_bytes(b"no database" * 1000)
        answer = real.get("/metrics")
        assert answer.status_code == 200
        assert "livedraft:learning_enabled 1.0" in answer.text


def test_places_come_back_when_completions_are_made_however_slowly_they_are_read(client):
    server, served = client.server, client.server.served

    async def never_read():
        job = chat_job(ChatCompletionRequest(**CHAT, n=2), served, id="x", reports_counts=False)
        places = server.take_places(2, served)
        updates = server.updates(job, served, places)
        assert server.num_open == 2
        await anext(updates)
        while server.num_open:  # the first piece is all that is ever read
            await asyncio.sleep(0.001)
        await updates.aclose()
        places.give_back()
        return server.num_open

    assert client.run(asyncio.wait_for(never_read(), 20)) == 0


def test_a_stream_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr("livedraft.server.app._SENDING_SECONDS", 0.1)
    with InProcess(scripted("abc"), ServerConfig(request_timeout_seconds=0.1)) as client:

        async def stuck():
            body = json.dumps(CHAT | {"stream": True}).encode()
            sent = []

            async def receive():
                await asyncio.sleep(60 if sent else 0)
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message):
                sent.append(message)
                if message["type"] == "http.response.body":
                    await asyncio.sleep(60)

            await asyncio.wait_for(client.app(chat_scope(), receive, send), 20)

        client.run(stuck())
        assert client.server.num_open == 0


def test_nulls_are_the_same_as_leaving_out(client):
    nothing = dict.fromkeys(
        ["stop", "seed", "user", "tools", "max_tokens", "stream_options", "top_logprobs", "unknown"]
    )
    assert client.complete(CHAT | nothing).status == 200


def test_other_errors_have_the_same_shape(client):
    assert error_of(client.post("/v1/chat/completions", CHAT | {"model": "gpt-9"}), 404)["code"] == "model_not_found"
    error_of(client.get("/v1/models/other"), 404)
    error_of(client.get("/nothing"), 404)
    error_of(client.get("/v1/chat/completions"), 405)
    for content, kind in (
        (b"{not json", "application/json"),
        (b"", "application/json"),
        (b"{}", "text/plain"),
        (b"[]", None),
    ):
        headers = {"content-type": kind} if kind else {}
        error_of(client.run(client.http.post("/v1/chat/completions", content=content, headers=headers)), 400)
    deep = b'{"model": "script", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    error_of(
        client.run(
            client.http.post("/v1/chat/completions", content=deep, headers={"content-type": "application/json"})
        ),
        400,
    )


def test_models_health_and_metrics(client):
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("script", "model", 400)
    assert client.get("/v1/models/script").json() == card
    assert client.get("/health").status_code == 200
    client.complete(CHAT)
    text = client.get("/metrics").text
    assert 'livedraft:request_success_total{finished_reason="stop"} 3.0' in text
    assert "livedraft:time_to_first_token_seconds_count 1.0" in text
    # The whole answer but its first update of three tokens.
    assert f"livedraft:inter_token_latency_seconds_count {len('héllo 🌈 world'.encode()) + 1 - 3}.0" in text


def test_request_ids_are_echoed_or_made_and_the_log_holds_no_prompt(client, caplog):
    caplog.set_level(logging.INFO, "livedraft.access")
    secret = CHAT | {"messages": [{"role": "user", "content": "a very private question"}]}
    given = client.post("/v1/chat/completions", secret, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "chatcmpl-abc-1"
    made = client.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": "not plain\t" + "x" * 100})
    assert len(made.headers["x-request-id"]) == 32
    assert client.get("/nothing").headers["x-request-id"]
    log = caplog.text
    assert "abc-1 POST /v1/chat/completions 200" in log
    assert "private" not in log
    # One id sent twice at once is two requests.
    ids = {request.id for request in client.server.served.backend.requests}
    assert len(ids) == 2


def test_keys_open_v1_only_and_all_are_tried():
    with InProcess(scripted("x"), ServerConfig(api_keys=("one", "two"))) as client:
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Bearer "}):
            error = error_of(client.post("/v1/chat/completions", CHAT, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
            assert client.get("/v1/models", headers=headers).status_code == 401
        for key in ("one", "two"):
            assert client.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
        assert client.get("/health").status_code == 200


def test_bodies_past_the_limit_are_413_whether_they_say_their_size_or_not():
    with InProcess(scripted("x"), ServerConfig(max_request_bytes=2000)) as client:
        big = CHAT | {"user": "u" * 3000}
        error_of(client.post("/v1/chat/completions", big), 413)

        async def in_pieces():
            for piece in (b'{"user": "', b"u" * 1500, b"u" * 1500, b'"}'):
                yield piece

        answer = client.run(client.http.post("/v1/chat/completions", content=in_pieces()))
        error_of(answer, 413)
        assert client.complete(CHAT).status == 200


def test_a_full_queue_is_429_and_places_come_back():
    with InProcess(scripted("x", holds=True, max_num_seqs=1), ServerConfig(max_queue=1)) as client:

        async def flood():
            held = [asyncio.ensure_future(client.http.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
            while client.server.num_open < 2:
                await asyncio.sleep(0.001)
            refused = await client.http.post("/v1/chat/completions", json=CHAT)
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            return refused

        refused = client.run(flood())
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        assert client.server.num_open == 0
        backend = client.server.served.backend
        assert set(backend.cancelled) == {request.id for request in backend.requests}


def test_what_would_never_fit_the_queue_is_400_not_try_again():
    with InProcess(scripted("x", max_num_seqs=1), ServerConfig(max_queue=10)) as client:
        body = {"model": "script", "prompt": ["a", "b", "c"], "n": 4}
        assert error_of(client.post("/v1/completions", body), 400)["param"] == "n"
        assert client.complete(body | {"n": 3}).status == 200


def test_an_unexpected_error_is_a_500_with_the_request_id_and_places_come_back(client, monkeypatch, caplog):
    monkeypatch.setattr(client.server.served.backend, "submit", lambda request, deliver: 1 / 0)
    caplog.set_level(logging.INFO, "livedraft.access")
    answer = client.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": "bug-7"})
    assert "bug-7" in error_of(answer, 500)["message"]
    assert answer.headers["x-request-id"] == "bug-7"
    assert "bug-7 POST /v1/chat/completions 500" in caplog.text
    assert client.server.num_open == 0


def test_a_reader_that_is_slow_gets_all_that_was_made_in_time():
    with InProcess(scripted("abcdefghi"), ServerConfig(request_timeout_seconds=0.2)) as client:
        server, served = client.server, client.server.served

        async def read_slowly():
            job = chat_job(ChatCompletionRequest(**CHAT), served, id="x", reports_counts=False)
            received = []
            async for _, update in server.updates(job, served, server.take_places(1, served)):
                received.append(update)
                await asyncio.sleep(0.1)
            return received

        received = client.run(read_slowly())
        assert received[-1].finish_reason == "stop"
        assert sum(len(update.token_ids) for update in received) == 10


def test_loading_is_503_and_draining_lets_running_requests_finish():
    may_load = threading.Event()
    served = scripted("x")

    def load():
        may_load.wait(20)
        return served

    client = InProcess(load)
    client._loaded = lambda: asyncio.sleep(0)
    with client:
        for response in (client.get("/health"), client.post("/v1/chat/completions", CHAT), client.get("/v1/models")):
            assert response.status_code == 503
        assert client.get("/health").json() == {"status": "loading"}
        assert client.post("/v1/chat/completions", CHAT).headers["retry-after"]
        assert client.get("/metrics").status_code == 200
        may_load.set()
        client.run(InProcess._loaded(client))
        assert client.complete(CHAT).status == 200
        client.server.drain()
        error_of(client.post("/v1/chat/completions", CHAT), 503)
        assert client.get("/health").status_code == 503
    assert served.backend.is_closed


def test_a_timeout_ends_the_request_with_504_and_in_a_stream_with_an_error_event():
    with InProcess(scripted("x", holds=True), ServerConfig(request_timeout_seconds=0.1)) as client:
        assert error_of(client.post("/v1/chat/completions", CHAT), 504)["code"] == "timeout"
        stream = client.complete(CHAT | {"stream": True})
        assert stream.choices[0].text == "x"
        assert "longer than 0.1 seconds" in stream.body["error"]["message"]
        assert len(client.server.served.backend.cancelled) == 2
        assert client.server.num_open == 0


def test_a_request_that_failed_inside_is_500_and_in_a_stream_an_error_event():
    with InProcess(scripted("abc", fails=True)) as client:
        assert error_of(client.post("/v1/chat/completions", CHAT), 500)["type"] == "server_error"
        stream = client.complete(CHAT | {"stream": True, "n": 2})
        assert "failed" in stream.body["error"]["message"]
        assert client.server.num_open == 0


def test_a_client_that_leaves_in_the_middle_of_a_stream_is_cancelled():
    with InProcess(scripted("abcdef", holds=True)) as client:
        backend = client.server.served.backend

        async def leave():
            messages, gone = [], asyncio.Event()
            body = json.dumps(CHAT | {"stream": True, "n": 2}).encode()

            async def receive():
                if not messages:
                    return {"type": "http.request", "body": body, "more_body": False}
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                messages.append(message)
                if b"ef" in message.get("body", b""):
                    gone.set()

            await asyncio.wait_for(client.app(chat_scope(), receive, send), 20)

        client.run(leave())
        assert sorted(backend.cancelled) == sorted(request.id for request in backend.requests)
        assert client.server.num_open == 0


def test_counts_of_speculation_and_predictions_are_reported_where_asked():
    with InProcess(scripted("abc"), ServerConfig(per_request_metrics=True)) as client:
        reply = client.complete(CHAT | {"prediction": {"type": "content", "content": "abd"}})
        counts = reply.body["metrics"]["speculative_decoding"]
        assert (counts["mean_acceptance_length"], counts["draft_acceptance_rate"]) == (2.5, 0.5)
        assert counts["acceptance_histogram"] == [1, 0, 0, 1]
        details = reply.usage["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (2, 3)
        assert client.server.served.backend.requests[0].prediction_token_ids == tuple(
            client.server.served.tokenizer.encode_text("abd")
        )
        assert client.complete(CHAT | {"n": 2}).body["metrics"] == {"speculative_decoding": None}
        stream = client.complete(CHAT | {"stream": True, "stream_options": {"include_usage": True}})
        assert stream.chunks[-1]["metrics"]["speculative_decoding"] == counts


def test_options_reach_the_backend(client):
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": -1, "stop": "x", "stop_token_ids": [3],
        "max_completion_tokens": 9, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1,
        "logit_bias": {"7": 2.5}, "logprobs": True, "top_logprobs": 2, "ignore_eos": True, "store": False,
        "num_speculative_tokens": 2, "n": 2,
    }  # fmt: skip
    reply = client.complete(CHAT | options | {"metadata": {"a": "b"}, "user": "me"})
    assert reply.body["metadata"] == {"a": "b"}
    first, second = client.server.served.backend.requests
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (2**63 - 1, ("x",), (3,))
    assert (sampling.max_tokens, sampling.logprobs, sampling.ignore_eos) == (9, 2, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert sampling.logit_bias == ((7, 2.5),)
    assert (first.store, first.num_speculative_tokens, first.client_key) == (False, 2, "me")
    assert second.sampling.seed not in (None, sampling.seed)
    assert second.id != first.id
    unlimited = client.complete(CHAT)
    assert unlimited.status == 200
    last = client.server.served.backend.requests[-1]
    assert last.sampling.max_tokens == 400 - len(last.prompt_token_ids)
    assert last.sampling.temperature == 1.0


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.arguments.q }}]"
    "{% endfor %};{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "find", "arguments": {"q": 1}}\n</tool_call>', "", [("find", '{"q": 1}')]),
        ('Let me look. <tool_call>{"name": "find", "arguments": {}}</tool_call>', "Let me look. ", [("find", "{}")]),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": "x"}</tool_call>',
            "",
            [("a", "{}"), ("b", "x")],
        ),
        ('{"name": "find", "parameters": {"q": "é"}}', "", [("find", '{"q": "\\u00e9"}')]),
        ('{"no": "call"}', '{"no": "call"}', None),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", None),
        ("<tool_call> never closed", "<tool_call> never closed", None),
        ("just < text <tool", "just < text <tool", None),
        ("<tool_call>" + "\n" * 3000, "<tool_call>" + "\n" * 3000, None),
    ],
)
def test_tool_calls_are_parsed_and_what_is_none_stays_text(text, content, calls):
    with InProcess(scripted(text, template=TOOLS_TEMPLATE)) as client:
        for stream in ({}, {"stream": True}):
            choice = client.complete(CHAT | {"tools": [TOOL]} | stream).choices[0]
            assert choice.text == content
            found = choice.tool_calls and [
                (c["function"]["name"], c["function"]["arguments"]) for c in choice.tool_calls
            ]
            assert found == calls
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
        untouched = client.complete(CHAT | {"tools": [TOOL], "tool_choice": "none"}).choices[0]
        assert (untouched.text, untouched.tool_calls) == (text, None)


def test_tools_and_their_results_reach_the_template():
    with InProcess(scripted("ok", template=TOOLS_TEMPLATE)) as client:
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"q": 5}'}}],
            },
            {"role": "tool", "content": "found", "tool_call_id": "1"},
        ]
        assert client.complete(CHAT | {"messages": messages, "tools": [TOOL]}).status == 200
        served = client.server.served
        prompt = served.tokenizer.decode(served.backend.requests[-1].prompt_token_ids)
        assert prompt == "findsystem:be kind;user:hi;assistant:[5];tool:found;"


def test_many_requests_in_one_round_cost_one_wake_up():
    from livedraft.records import Update
    from livedraft.server.handover import Handover

    async def count():
        loop = asyncio.get_running_loop()
        calls = []
        schedule = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda function: (calls.append(1), schedule(function))
        handover, queue = Handover(loop), asyncio.Queue()
        thread = threading.Thread(
            target=lambda: [handover.deliver(queue, n, Update(token_ids=(n,))) for n in range(16)]
        )
        thread.start()
        time.sleep(0.05)  # the loop is held: all sixteen come in one round
        thread.join()
        received = [await queue.get() for _ in range(16)]
        return len(calls), [index for index, *_ in received]

    assert asyncio.run(count()) == (1, list(range(16)))


def test_joined_streams_reject_what_comes_after_the_finish():
    """Guards the helper the equivalence tests lean on."""
    chunk = {"choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]}
    with pytest.raises(AssertionError):
        joined("".join(f"data: {json.dumps(chunk)}\n\n" for _ in range(2)) + "data: [DONE]\n\n", False)


def test_a_client_may_name_its_route_in_a_header_or_in_metadata(client):
    backend = client.server.served.backend
    assert client.post("/v1/chat/completions", CHAT, headers={"x-livedraft-route": "shop"}).status_code == 200
    assert client.post("/v1/chat/completions", CHAT | {"metadata": {"route": "tools"}}).status_code == 200
    assert client.post("/v1/chat/completions", CHAT).status_code == 200
    assert [request.route for request in backend.requests[-3:]] == ["shop", "tools", "default"]
    for name in ("Shop", "a b", "x" * 41, "../x"):
        message = error_of(client.post("/v1/chat/completions", CHAT, headers={"x-livedraft-route": name}), 400)
        assert "route must be" in str(message)
