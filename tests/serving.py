"""The real application without a socket, on an event loop of its own: what the server's and the equivalence tests talk to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from livedraft.config import ServerConfig
from livedraft.server.app import Server, create_app
from livedraft.server.openai_api import Served


@dataclass(kw_only=True)
class Answer:
    """One choice as a client sees it, whole or joined from a stream."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[Any] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] | None = None


@dataclass(kw_only=True)
class Reply:
    status: int
    choices: list[Answer]
    usage: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def counts(self) -> tuple[int, int, int]:
        assert self.usage is not None
        return tuple(self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))  # type: ignore[return-value]


class InProcess:
    """`with InProcess(served) as client:`; posts run on the client's own event loop, several of them together."""

    def __init__(self, load: Served | Callable[[], Served], config: ServerConfig | None = None) -> None:
        self.server = Server(config or ServerConfig(), load if callable(load) else lambda: load)
        self.app = create_app(self.server)
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> InProcess:
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.run(self._lifespan.__aenter__())
        self.run(self._loaded())
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        return self

    def __exit__(self, *exception: object) -> None:
        self.run(self.http.aclose())
        self.run(self._lifespan.__aexit__(None, None, None))
        self.loop.close()

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def _loaded(self) -> None:
        while self.server.phase == "loading":
            await asyncio.sleep(0.001)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.http.get(path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.run(self.http.post(path, **({} if body is None else {"json": body}), **options))

    def complete(self, body: dict[str, Any], *more: dict[str, Any]) -> Any:
        """The reply to a chat (`messages`) or completion body, or to several sent together."""
        replies = self.run(self._together([body, *more]))
        return replies if more else replies[0]

    async def _together(self, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
        return list(await asyncio.gather(*(self.reply(body) for body in bodies)))

    async def reply(self, body: dict[str, Any]) -> Reply:
        is_chat = "messages" in body
        response = await self.http.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
        if response.status_code != 200:
            return Reply(status=response.status_code, choices=[], body=response.json())
        if body.get("stream"):
            return joined(response.text, is_chat)
        whole = response.json()
        choices = [_answer(choice, is_chat) for choice in whole["choices"]]
        return Reply(status=200, choices=choices, usage=whole["usage"], body=whole)


def _answer(choice: dict[str, Any], is_chat: bool) -> Answer:
    message = choice.get("message", {})
    return Answer(
        text=(message.get("content") or "") if is_chat else choice["text"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=logprob_rows(choice["logprobs"]),
        tool_calls=message.get("tool_calls"),
    )


def joined(text: str, is_chat: bool) -> Reply:
    """A stream's events put together as a client would."""
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    reply = Reply(status=200, choices=[], chunks=chunks)
    by_index: dict[int, Answer] = {}
    for chunk in chunks:
        if "error" in chunk:
            reply.body = chunk
            continue
        if chunk.get("usage"):
            reply.usage = chunk["usage"]
        for choice in chunk["choices"]:
            answer = by_index.setdefault(choice["index"], Answer())
            assert answer.finish_reason is None, "nothing comes after the finish"
            piece = choice["delta"] if is_chat else choice["text"]
            answer.text += (piece.get("content") or "") if is_chat else piece
            if is_chat and "tool_calls" in piece:
                answer.tool_calls = piece["tool_calls"]
            answer.logprobs += logprob_rows(choice["logprobs"])
            answer.finish_reason = choice["finish_reason"]
            answer.stop_reason = choice.get("stop_reason")
    reply.choices = [by_index[index] for index in sorted(by_index)]
    return reply


def logprob_rows(logprobs: dict[str, Any] | None) -> list[Any]:
    """(token, logprob, [(token, logprob) ...]) a position, from either endpoint's format."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            (row["bytes"], row["logprob"], [(top["bytes"], top["logprob"]) for top in row["top_logprobs"]])
            for row in logprobs["content"]
        ]
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    return [(token, value, sorted(top.items())) for token, value, top in rows]
