"""`livedraft chat`: a conversation in the terminal, with a running server or a model loaded here; both stream alike."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import httpx

from livedraft.config import ServerConfig
from livedraft.records import UserError
from livedraft.settings import Settings

_LOCAL_URL = "http://local"


@dataclass(frozen=True, kw_only=True)
class _Options:
    temperature: float
    max_tokens: int
    prints_stats: bool


def run(
    settings: Settings,
    *,
    url: str | None,
    api_key: str | None,
    system: str,
    temperature: float,
    max_tokens: int,
    prints_stats: bool,
) -> None:
    """Until end of input. Raises UserError when the server does not answer or the model does not load."""
    options = _Options(temperature=temperature, max_tokens=max_tokens, prints_stats=prints_stats)
    asyncio.run(_converse(settings, url, api_key, system, options))


async def _converse(settings: Settings, url: str | None, api_key: str | None, system: str, options: _Options) -> None:
    async with AsyncExitStack() as stack:
        if url is None:
            client = await stack.enter_async_context(await _local_client(settings, stack))
        else:
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            base = url.rstrip("/").removesuffix("/v1")
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, headers=headers, timeout=None))
        model = await _model_name(client, url)
        print(f"{model}. Ctrl-D ends.", file=sys.stderr)
        num_failed = 0
        messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        while (line := await _next_line()) is not None:
            if not line.strip():
                continue
            question = {"role": "user", "content": line}
            try:
                answer = await _turn(client, model, [*messages, question], options)
            except UserError as error:  # too long, or the server is gone for now: the conversation stays
                print(f"livedraft: {error}", file=sys.stderr)
                num_failed += 1
                continue
            messages += [question, {"role": "assistant", "content": answer}]
        if num_failed:
            raise UserError(f"{num_failed} of the questions got no answer.")


async def _local_client(settings: Settings, stack: AsyncExitStack) -> httpx.AsyncClient:
    """The server's own application, without a socket."""
    from livedraft.server.app import Server, create_app, in_thread_of_its_own
    from livedraft.server.local import open_llm, serve_llm

    llm = await in_thread_of_its_own(lambda: open_llm(settings, learn=False))
    for name, text in (served := serve_llm(llm, settings)).banner:
        print(f"{name:>9}  {text}", file=sys.stderr)
    config = replace(ServerConfig(), per_request_metrics=True, request_timeout_seconds=1e9)
    server = Server(config, lambda: served)
    app = create_app(server)
    await stack.enter_async_context(app.router.lifespan_context(app))
    while server.phase == "loading":
        await asyncio.sleep(0.01)
    return httpx.AsyncClient(transport=_StreamingTransport(app), base_url=_LOCAL_URL, timeout=None)


async def _model_name(client: httpx.AsyncClient, url: str | None) -> str:
    try:
        answer = await client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"No server answers at {url} ({type(error).__name__}); start one with: livedraft serve."
        ) from error
    _raise_for(answer.status_code, answer.content)
    return str(answer.json()["data"][0]["id"])


async def _turn(client: httpx.AsyncClient, model: str, messages: list[dict[str, str]], options: _Options) -> str:
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "temperature": options.temperature,
        "max_completion_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": False,
    }
    pieces: list[str] = []
    last: dict[str, Any] = {}
    started, first = time.perf_counter(), 0.0
    try:
        async for chunk in _chunks(client, body):
            last = chunk
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() if text else 0.0)
                pieces.append(text)
                print(text, end="", flush=True)
    except httpx.HTTPError as error:
        raise UserError(f"The connection to the server broke ({type(error).__name__}); ask again.") from error
    print()
    if options.prints_stats:
        print(_stats_line(last, started, first), file=sys.stderr)
    return "".join(pieces)


async def _chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            _raise_for(answer.status_code, await answer.aread())
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise UserError(chunk["error"]["message"])
                yield chunk


def _stats_line(last: dict[str, Any], started: float, first: float) -> str:
    now = time.perf_counter()
    num_tokens = (last.get("usage") or {}).get("completion_tokens", 0)
    parts = [f"{num_tokens} tokens", f"first after {first - started:.2f} s" if first else "no text"]
    if first and num_tokens > 1:
        parts.append(f"{(num_tokens - 1) / (now - first):.1f} tokens/s")
    speculation = (last.get("metrics") or {}).get("speculative_decoding")
    if speculation and speculation["draft_acceptance_rate"] is not None:
        parts.append(f"acceptance {speculation['draft_acceptance_rate']:.2f}")
        parts.append(f"mean acceptance length {speculation['mean_acceptance_length']:.2f}")
    if speculation:
        parts.append(f"draft {speculation['draft_version']}")
    return "[" + ", ".join(parts) + "]"


def _raise_for(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "it is not livedraft, or not OpenAI's API"
    raise UserError(f"The server answered {status}: {message}")


async def _next_line() -> str | None:
    """On a daemon thread: at the end asyncio waits for the threads of its own pool, so Ctrl-C would wait for Enter."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | None] = loop.create_future()

    def give(line: str | None) -> None:
        if not answer.done():
            answer.set_result(line)

    def read() -> None:
        line = _read_line()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(give, line)

    threading.Thread(target=read, daemon=True).start()
    return await answer


def _read_line() -> str | None:
    try:
        line = input("> " if sys.stdin.isatty() else "")
        return line.encode(errors="surrogateescape").decode(errors="replace")  # a terminal may send what is no UTF-8
    except EOFError:
        return None


class _StreamingTransport(httpx.AsyncBaseTransport):
    """httpx's own ASGI transport gives the body only when it is whole; this one gives it piece by piece."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        messages: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": await request.aread(), "more_body": False}]
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            messages.put_nowait(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": request.method, "scheme": "http", "path": request.url.path, "raw_path": request.url.raw_path,
            "query_string": request.url.query, "root_path": "", "client": None, "server": ("local", 80),
            "headers": [(key.lower(), value) for key, value in request.headers.raw],
        }  # fmt: skip

        async def serve() -> None:
            try:
                await self._app(scope, receive, send)
                messages.put_nowait(None)
            except BaseException as error:
                messages.put_nowait(error)
                raise

        task = asyncio.ensure_future(serve())
        start = await messages.get()
        if not isinstance(start, dict):
            await task
            raise httpx.ReadError("the application gave no answer")
        return httpx.Response(start["status"], headers=start["headers"], stream=_Body(messages, task, ended))


class _Body(httpx.AsyncByteStream):
    def __init__(self, messages: asyncio.Queue[Any], task: asyncio.Future[None], ended: asyncio.Event) -> None:
        self._messages, self._task, self._ended = messages, task, ended

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while isinstance(message := await self._messages.get(), dict):
            yield message.get("body", b"")
        if message is not None:
            raise message

    async def aclose(self) -> None:
        """The reader may leave early: that is a client going away."""
        self._ended.set()
        await asyncio.wait({self._task})
