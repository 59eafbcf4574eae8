"""The official client against the real server with the real model, as existing programs would use it."""

import concurrent.futures
import json
import time

import openai
import pytest

from tests.e2e.server_process import ServerProcess

MODEL = "smollm2-135m"
pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
RIVERS = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def server(smollm2_path):
    with ServerProcess(MODEL, "--no-learn", "--dtype", "float32", "--api-key", "secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=120) as made:
        yield made


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": RIVERS, "max_completion_tokens": 24, "temperature": 0, **options}
    )


def streamed(stream):
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    return text, finish, chunks


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "livedraft"
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.models.retrieve("gpt-9")


def test_chat_whole_and_streamed(client):
    whole = chat(client)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    text, finish, chunks = streamed(chat(client, stream=True, stream_options={"include_usage": True}))
    assert (text, finish) == (whole.choices[0].message.content, ["length"])
    assert chunks[-1].usage.completion_tokens == 24
    assert len(chunks) > 3  # the answer was said before: suffixes make few, long pieces of it


def test_completion_whole_and_streamed(client):
    options = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options, echo=True)
    assert whole.choices[0].text.startswith("The capital of France is Paris")
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
    assert "The capital of France is" + "".join(pieces) == whole.choices[0].text


def test_a_conversation_ends_by_itself_and_its_next_turn_reuses_the_first(client):
    messages = [{"role": "user", "content": "Say hello and nothing else, in one word, please, dear assistant of mine."}]
    first = chat(client, messages=messages, max_completion_tokens=200)
    assert first.choices[0].finish_reason == "stop"
    answer = first.choices[0].message.content
    assert "<|im_end|>" not in answer
    second = chat(
        client,
        messages=[*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "Again."}],
    )
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_n_choices_stop_and_seed(client):
    sampled = {"temperature": 0.9, "seed": 7, "max_completion_tokens": 12}
    first, second = (chat(client, n=3, **sampled) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    assert chat(client, **sampled).choices[0].message.content == texts[0]
    whole = chat(client).choices[0].message.content
    word = whole.split()[4]
    stopped = chat(client, stop=[word, "never"])
    assert stopped.choices[0].message.content == whole[: whole.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    assert streamed(chat(client, stop=word, stream=True))[0] == whole[: whole.index(word)]


def test_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=3, max_completion_tokens=6)
    rows = answer.choices[0].logprobs.content
    assert len(rows) == 6
    assert bytes(byte for row in rows for byte in row.bytes).decode() == answer.choices[0].message.content
    for row in rows:
        assert len(row.top_logprobs) == 3
        assert row.top_logprobs[0].logprob == max(top.logprob for top in row.top_logprobs)
        assert row.logprob == row.top_logprobs[0].logprob <= 0  # greedy
    legacy = client.completions.create(model=MODEL, prompt="One two three", max_tokens=4, temperature=0, logprobs=2)
    found = legacy.choices[0].logprobs
    assert "".join(found.tokens) == legacy.choices[0].text
    assert [len(top) for top in found.top_logprobs] == [2] * 4


def test_penalties_bias_and_json(client):
    plain = chat(client).choices[0].message.content
    assert chat(client, frequency_penalty=1.8, presence_penalty=1.0).choices[0].message.content != plain
    biased = chat(client, max_completion_tokens=3, extra_body={"logit_bias": {"2": 100}})
    assert (biased.choices[0].message.content, biased.choices[0].finish_reason) == ("", "stop")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        messages=[{"role": "user", "content": "Describe Paris in JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        max_completion_tokens=80,
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "people"}


def test_a_prediction_is_accepted_and_counted(client):
    whole = chat(client, max_completion_tokens=40)
    again = chat(
        client, max_completion_tokens=40, prediction={"type": "content", "content": whole.choices[0].message.content}
    )
    assert again.choices[0].message.content == whole.choices[0].message.content
    details = again.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 20
    assert details.rejected_prediction_tokens < 10


def test_errors_are_the_clients_own_exceptions(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-2)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-9")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "word " * 3000}])
    assert caught.value.code == "context_length_exceeded"
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        chat(wrong)


def test_leaving_a_stream_frees_the_slot(client, server):
    stream = chat(client, stream=True, max_completion_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    import httpx

    while "livedraft:num_requests_running 0.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_thirty_two_clients_at_once_get_what_each_gets_alone(client):
    prompts = [[{"role": "user", "content": f"Count to {n}."}] for n in range(1, 9)]
    alone = [
        chat(client, messages=messages, max_completion_tokens=10).choices[0].message.content for messages in prompts
    ]

    def one(number):
        options = {"messages": prompts[number % 8], "max_completion_tokens": 10}
        if number % 2:
            return streamed(chat(client, stream=True, **options))[0]
        return chat(client, **options).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(32)))
    assert answers == [alone[number % 8] for number in range(32)]
