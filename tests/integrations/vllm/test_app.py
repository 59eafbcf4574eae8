"""The public server in front of a vLLM that is a few lines of ASGI: what is passed on, kept back, remembered."""

import asyncio
import json
import threading
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from livedraft.config import ServerConfig
from livedraft.integrations.vllm.app import VllmServer, create_app
from livedraft.integrations.vllm.traces import KnownRequests


class FakeVllm:
    """A real HTTP server that answers as it is told."""

    def __init__(self) -> None:
        self.seen: list[dict] = []
        self.behave = "answer"
        self.gone = threading.Event()
        self.go_on = threading.Event()
        config = uvicorn.Config(self._app, port=0, log_level="error", lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            pass
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(5)

    async def _app(self, scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        self.seen.append(
            {"path": scope["path"], "query": query, "headers": headers, "body": body, "method": scope["method"]}
        )
        is_stream = self.behave in ("stream", "break")
        kind = b"text/event-stream" if is_stream else b"application/json"
        status = 418 if self.behave == "teapot" else 200
        if self.behave == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
            return
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), (b"x-theirs", b"1")]}
        )
        if not is_stream:
            await send({"type": "http.response.body", "body": b'{"ok": true}'})
            return
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.to_thread(self.go_on.wait, 5)
        if self.behave == "break":
            raise RuntimeError("the engine died")
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class FakeFleet:
    def __init__(self, *urls: str) -> None:
        self.members = [
            SimpleNamespace(
                name=url, replica=SimpleNamespace(url=url), num_running=0, phase="ready",
                capabilities=SimpleNamespace(sampling="fine"), version="v1",
            )
            for url in urls
        ]  # fmt: skip

    def ready(self):
        return self.members

    def choose(self, without):
        usable = [member for member in self.members if member.name not in without]
        return min(usable, key=lambda member: member.num_running, default=None)

    def stop_starting(self) -> None: ...


@pytest.fixture
def vllm():
    one = FakeVllm()
    yield one
    one.go_on.set()
    one.close()


@pytest.fixture
def make(vllm, tmp_path):
    """(a function that asks the public server, its service, itself) with these URLs behind it."""
    made: list[VllmServer] = []
    loop = asyncio.new_event_loop()

    def build(*urls: str, **config):
        busy: list[bool] = []
        service = SimpleNamespace(
            settings=SimpleNamespace(server=ServerConfig(**config)), fleet=FakeFleet(*(urls or (vllm.url,))),
            known=KnownRequests(), secret=b"s" * 32, capture=object(), state=tmp_path, replica_key="key", set_busy=busy.append,
            busy=busy, shipments=[], is_full=False, weights_file=lambda id: tmp_path / "w" if id == "v1" else None,
        )  # fmt: skip
        service.take = lambda body: not service.is_full and (service.shipments.append(body) or True)
        server = VllmServer(service)
        server.phase = "ready"

        def ask(method: str, path: str, **options) -> httpx.Response:
            return loop.run_until_complete(_ask(server, method, path, options))

        made.append(server)
        return ask, service, server

    yield build
    for server in made:
        loop.run_until_complete(server.http.aclose())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def _ask(server: VllmServer, method: str, path: str, options: dict) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(server))
    async with httpx.AsyncClient(transport=transport, base_url="http://public") as client:
        return await client.request(method, path, **options)


def post(client, path="/v1/completions", **options):
    return client("POST", path, **({"json": {"prompt": "a b"}} | options))


def _known(vllm, service, index=-1):
    return service.known.of("cmpl-" + vllm.seen[index]["headers"]["x-request-id"] + "-0")


def test_an_answer_is_passed_on_with_its_status_and_headers(vllm, make):
    client, service, _ = make()
    vllm.behave = "teapot"
    answer = post(client, "/v1/completions?x=1", headers={"x-mine": "2", "authorization": "Bearer secret"})
    assert (answer.status_code, answer.json(), answer.headers["x-theirs"]) == (418, {"ok": True}, "1")
    seen = vllm.seen[0]
    assert seen["query"] == "x=1" and seen["headers"]["x-mine"] == "2"
    assert "authorization" not in seen["headers"]  # the client's key is for us
    assert service.busy == [True, False] and service.fleet.members[0].num_running == 0


def test_what_may_be_learnt_from_is_named_and_remembered(vllm, make):
    client, service, _ = make()
    messages = [{"role": "user", "content": "hi"}]
    later = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    post(client, "/v1/chat/completions", json={"messages": messages, "user": "u"})
    post(client, "/v1/chat/completions", json={"messages": later})
    first, second = _known(vllm, service, 0), _known(vllm, service, 1)
    assert first.conversation_key == second.conversation_key  # turns of one conversation
    assert first.client_key and not second.client_key


@pytest.mark.parametrize(
    "options",
    [
        {"json": {"prompt": "a", "store": False}},
        {"headers": {"x-livedraft-store": "false"}},
        {"content": b"[1", "json": None},
    ],
)
def test_what_may_not_be_kept_goes_under_a_private_name(vllm, make, options):
    client, service, _ = make()
    assert post(client, **options).status_code == 200
    assert vllm.seen[0]["headers"]["x-request-id"].startswith("livedraftprivate-")
    assert _known(vllm, service) is None
    assert b"store" not in vllm.seen[0]["body"]


def test_requests_that_generate_nothing_are_private_too(vllm, make):
    client, _, _ = make()
    post(client, "/tokenize")
    post(client, "/v1/embeddings", json={"input": "a"})
    assert all(one["headers"]["x-request-id"].startswith("livedraftprivate-") for one in vllm.seen)


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc", "/pause", "/resume", "/update_weights", "/reset_prefix_cache", "/sleep", "/server_info",
        "/v1/load_lora_adapter", "/v1//pause", "/v1/..", "/v1/%2e%2e/pause", "/v1/x/%2E%2E/%2e%2e/pause",
        "/v1/a%3fb", "/invocations",
    ],
)  # fmt: skip
def test_what_would_change_the_server_is_not_there(vllm, make, path):
    client, _, _ = make()
    assert post(client, path).status_code == 404
    assert vllm.seen == []


def test_a_stream_comes_as_it_is_made(vllm):
    """Over real sockets: the first piece is there before the last is made."""
    vllm.behave = "stream"
    service_config = ServerConfig()
    service = SimpleNamespace(
        settings=SimpleNamespace(server=service_config), fleet=FakeFleet(vllm.url), known=KnownRequests(), secret=b"s" * 32,
        capture=object(), state=None, replica_key="key", set_busy=lambda is_busy: None, start=lambda: None, close=lambda: None,
    )  # fmt: skip
    server = VllmServer(service)
    public = uvicorn.Server(uvicorn.Config(create_app(server), port=0, log_level="error", interface="asgi3"))
    thread = threading.Thread(target=public.run, daemon=True)
    thread.start()
    while not public.started or server.phase != "ready":
        pass
    url = f"http://127.0.0.1:{public.servers[0].sockets[0].getsockname()[1]}"
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        pieces = answer.iter_text()
        assert next(pieces) == "data: 1\n\n"
        vllm.go_on.set()
        assert next(pieces) == "data: [DONE]\n\n"
    # A client that leaves takes its request along.
    vllm.behave = "hang"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=0.3)
    assert vllm.gone.wait(5)
    public.should_exit = True
    thread.join(10)
    assert service.fleet.members[0].num_running == 0 and server.num_open == 0


def test_a_replica_that_dies_in_the_middle_of_a_stream_is_said_in_the_stream(vllm, make):
    client, _, server = make()
    vllm.behave = "break"
    vllm.go_on.set()
    answer = post(client, json={"prompt": "a", "stream": True})
    assert answer.text.startswith("data: 1\n\n") and '"replica_lost"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert server.num_open == 0


def test_a_replica_that_is_gone_is_replaced_by_another(vllm, make):
    client, _, server = make("http://127.0.0.1:9", vllm.url)
    assert post(client).status_code == 200
    assert server.num_retried == 1
    client, _, _ = make("http://127.0.0.1:9")
    answer = post(client)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"


def test_keys_are_asked_for(vllm, make):
    client, _, _ = make(api_keys=("k",), admin_key="boss")
    assert post(client).status_code == 401
    assert post(client, headers={"authorization": "Bearer k"}).status_code == 200
    assert client("GET", "/admin/drafts", headers={"authorization": "Bearer k"}).status_code == 401


def test_a_sampler_that_could_not_be_mended_is_not_used(vllm, make):
    client, service, _ = make()
    service.fleet.members[0].capabilities.sampling = "broken"
    for body in ({"prompt": "a"}, {"prompt": "a", "temperature": 0.5}):
        answer = post(client, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
    assert post(client, json={"prompt": "a", "temperature": 0}).status_code == 200


def test_replicas_send_and_fetch_under_their_own_key(make, tmp_path):
    client, service, _ = make(api_keys=("k",))
    (tmp_path / "w").write_bytes(b"weights")
    key = {"authorization": "Bearer key"}
    for wrong in ({}, {"authorization": "Bearer k"}):
        assert post(client, "/replica/traces", content=b"x", json=None, headers=wrong).status_code == 401
        assert client("GET", "/replica/versions/v1", headers=wrong).status_code == 401
    assert post(client, "/replica/traces", content=b"x", json=None, headers=key).status_code == 204
    assert service.shipments == [b"x"]
    service.is_full = True
    assert post(client, "/replica/traces", content=b"x", json=None, headers=key).status_code == 503
    assert client("GET", "/replica/versions/v1", headers=key).content == b"weights"
    assert client("GET", "/replica/versions/v2", headers=key).status_code == 404


def test_health_says_when_no_replica_is_up(make):
    client, service, _ = make()
    assert client("GET", "/health").status_code == 200
    service.fleet.members = []
    answer = client("GET", "/health")
    assert answer.status_code == 503 and json.loads(answer.content)["status"] == "no replica is up"
