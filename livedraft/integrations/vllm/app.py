"""The public face of a fleet of vLLM servers: every endpoint of theirs passed through, streams as they come.

What is added: keys and limits (`server/gate.py`), the choice of a replica, opting out of learning, /metrics, /health, /admin.
What is kept from the public: vLLM's own routes for pausing it, running code in it and changing its weights; replicas reach
`/replica` under a key of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from livedraft import __version__
from livedraft.integrations.vllm.fleet import Member
from livedraft.integrations.vllm.metrics import render
from livedraft.integrations.vllm.service import VllmService
from livedraft.integrations.vllm.traces import Known
from livedraft.integrations.vllm.wire import PRIVATE_ID_PREFIX, REQUEST_ID_PREFIX
from livedraft.learning.capture import conversation_key
from livedraft.llm import conversation_root
from livedraft.records import DEFAULT_ROUTE
from livedraft.server.admin import admin_routes
from livedraft.server.app import Phase, disconnected, in_thread_of_its_own, may_store
from livedraft.server.errors import ApiError, error_body, error_response
from livedraft.server.gate import Gate, Receive, Scope, Send

logger = logging.getLogger("livedraft")
_PUBLIC = re.compile(
    r"/v1/[A-Za-z0-9_.:/-]+|/v2/(embed|rerank)|/cohere/v2/chat(/render)?"
    r"|/(tokenize|detokenize|tokenizer_info|version|ping|classify|pooling|rerank|score|generative_scoring)"
)
_NOT_PUBLIC = re.compile(r"/v1/(un)?load_lora_adapter.*|.*//.*|.*/\.\.?(/.*)?")
"""They change the server; and whatever a client library may rewrite into another path."""
_GENERATING = re.compile(r"/v1/(chat/completions|completions|responses|messages)")
_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
    "host", "content-length", "authorization", "x-request-id", "accept-encoding", "x-livedraft-store", "server", "date",
}  # fmt: skip
_MAX_SHIPMENT_BYTES = 256_000_000
_RETRY_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class Described:
    name: str
    banner: Sequence[tuple[str, str]]


class VllmServer:
    """State behind the routes; its counters belong to the event loop. Has what `cli/serve.py` asks of a server."""

    def __init__(self, service: VllmService) -> None:
        self.service, self.config = service, service.settings.server
        self.phase: Phase = "loading"
        self.load_error: BaseException | None = None
        self.num_open = 0
        self.answers: dict[int, int] = {}
        """How many by status."""
        self.num_retried = 0
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(self.config.request_timeout_seconds, connect=5.0),
            limits=httpx.Limits(max_connections=None),
        )

    async def start(self) -> None:
        try:
            await in_thread_of_its_own(self.service.start)
        except BaseException as error:
            self.phase, self.load_error = "failed", error
            raise
        if self.phase == "loading":
            self.phase = "ready"

    def drain(self) -> None:
        """Nothing new is taken; what runs goes on, and so does vLLM. While it starts there is nothing to wait for."""
        if self.phase == "loading" and self.service.fleet is not None:
            self.service.fleet.stop_starting()
        self.phase = "draining"

    @property
    def served(self) -> Described | None:
        """What the banner says, once something is served."""
        service = self.service
        fleet = service.fleet
        if self.phase not in ("ready", "draining") or fleet is None:
            return None
        first = fleet.ready()[0].capabilities if fleet.ready() else None
        vllm = f"vLLM {first.version} on {first.device}, " if first else ""
        sampling = {"repaired": "; its sampling of drafted tokens is mended", "broken": "; temperature 0 only"}
        learning = "off: nothing is stored"
        if service.capture is not None:
            learning = f'on: traces and drafts in {service.state}; for one request off with "store": false'
        lines = [
            ("model", service.name),
            ("replicas", vllm + f"{len(fleet.members)}{sampling.get(first.sampling, '') if first else ''}"),
            ("draft", f"{service.serving_id}, {first.num_speculative_tokens if first else 0} tokens a round"),
            ("learning", learning),
        ]
        return Described(name=service.name, banner=lines)

    # --- one request ------------------------------------------------------------------------------------------------

    async def forward(self, request: Request) -> Response:
        """To the least busy replica and back. Raises ApiError."""
        path = request.scope["path"]
        if _PUBLIC.fullmatch(path) is None or _NOT_PUBLIC.fullmatch(path) is not None:
            raise ApiError(404, f"There is no {path[:100]} here.")
        if self.phase != "ready" or self.service.fleet is None:
            raise ApiError(503, f"The server is {self.phase}; try again.", retry_after_seconds=_RETRY_SECONDS)
        content = await request.body()
        body = _json_object(content) if request.method == "POST" else None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        headers["x-request-id"] = self._name(request, body, path)
        if body is not None and "store" in body:  # ours to heed; vLLM's own store is another matter
            content = json.dumps({name: value for name, value in body.items() if name != "store"}).encode()
        return await self._send(request, body, path, content, headers)

    def _name(self, request: Request, body: dict[str, Any] | None, path: str) -> str:
        """What vLLM will call it: under a private name nothing is tapped."""
        id = uuid.uuid4().hex
        stores = body is not None and _GENERATING.fullmatch(path) is not None and body.get("store") is not False
        if not may_store(request) or not stores or self.service.capture is None:
            return PRIVATE_ID_PREFIX + id
        assert body is not None
        secret, user = self.service.secret, body.get("user")
        known = Known(
            route=DEFAULT_ROUTE,
            conversation_key=conversation_key(_root(body), secret),
            client_key=conversation_key([user], secret) if isinstance(user, str) and user else "",
            arrived_at=time.time(),
        )
        self.service.known.add(REQUEST_ID_PREFIX + id, known)
        return REQUEST_ID_PREFIX + id

    async def _send(
        self, request: Request, body: dict[str, Any] | None, path: str, content: bytes, headers: dict[str, str]
    ) -> Response:
        """A replica that is gone before it has said anything is replaced by another."""
        fleet = self.service.fleet
        tried: set[str] = set()
        while fleet is not None and (member := fleet.choose(tried)) is not None:
            tried.add(member.name)
            _refuse_unsafe_sampling(member, body)
            self._begin(member)
            sent = None
            try:
                url = httpx.URL(member.replica.url + path, query=request.scope["query_string"])
                made = self.http.build_request(request.method, url, content=content, headers=headers)
                sent = await self._unless_gone(request, self.http.send(made, stream=True))
                if sent is None:
                    return Response(status_code=499)  # nobody reads this
                return self._answer(member, sent)
            except httpx.TimeoutException as error:
                raise ApiError(504, "The request took too long and was ended.", code="timeout") from error
            except httpx.HTTPError:
                self.num_retried += 1
            finally:
                if sent is None:
                    self._end(member)
        raise ApiError(503, "No replica of the model is up; try again.", retry_after_seconds=_RETRY_SECONDS)

    async def _unless_gone(self, request: Request, sending: Awaitable[httpx.Response]) -> httpx.Response | None:
        """None when the client has left; then vLLM is told by the closed connection."""
        answer, gone = asyncio.ensure_future(sending), asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return None
            return answer.result()
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                    await answer

    def _answer(self, member: Member, sent: httpx.Response) -> Response:
        self.answers[sent.status_code] = self.answers.get(sent.status_code, 0) + 1
        headers = {name: value for name, value in sent.headers.items() if name.lower() not in _HOP_BY_HOP}

        async def end() -> None:
            self._end(member)
            await sent.aclose()

        return _PassedOn(_chunks(member, sent), sent.status_code, headers, on_end=end)

    def _begin(self, member: Member) -> None:
        member.num_running += 1
        self.num_open += 1
        if self.num_open == 1:
            self.service.set_busy(True)

    def _end(self, member: Member) -> None:
        member.num_running -= 1
        self.num_open -= 1
        if self.num_open == 0:
            self.service.set_busy(False)


class _PassedOn(StreamingResponse):
    """`on_end` runs also when the client left before the first chunk was asked for."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        status: int,
        headers: dict[str, str],
        *,
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(chunks, status_code=status, headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()


async def _chunks(member: Member, sent: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in sent.aiter_raw():
            yield chunk
    except httpx.HTTPError as error:
        logger.warning("%s broke off in the middle of an answer: %s", member.name, error)
        if not sent.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        broken = ApiError(502, "The replica that was answering is gone; ask again.", code="replica_lost")
        yield f"data: {json.dumps(error_body(broken))}\n\ndata: [DONE]\n\n".encode()


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(content)
    except ValueError:
        return None  # vLLM says what is wrong with it
    return body if isinstance(body, dict) else None


def _root(body: dict[str, Any]) -> list[Any]:
    """What every turn and repeat of a conversation has in common."""
    messages = body.get("messages")
    try:
        return (
            list(conversation_root(messages)) if isinstance(messages, list) else [body.get("prompt", body.get("input"))]
        )
    except (KeyError, TypeError):
        return [messages]  # vLLM will refuse it


def _refuse_unsafe_sampling(member: Member, body: dict[str, Any] | None) -> None:
    is_broken = member.capabilities is not None and member.capabilities.sampling == "broken"
    if is_broken and body is not None and body.get("temperature", 1.0) != 0:
        raise ApiError(
            400,
            "This build of vLLM samples drafted tokens wrongly and could not be mended; ask with temperature 0.",
            param="temperature",
        )


# --- the applications -----------------------------------------------------------------------------------------------


class Doors:
    """Two ways in: clients through the public application, replicas through their own."""

    def __init__(self, public: Any, replicas: Any) -> None:
        self._public, self._replicas = public, replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_replicas = scope["type"] == "http" and scope["path"].startswith("/replica/")
        await (self._replicas if is_replicas else self._public)(scope, receive, send)


def create_app(server: VllmServer) -> Doors:
    return Doors(_public_app(server), _replica_app(server.service))


def _public_app(server: VllmServer) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(server.start())
        loading.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # whoever runs the server reports it
        yield
        if not loading.done():
            server.drain()
            await asyncio.wait({loading})
        await server.http.aclose()
        await run_in_threadpool(server.service.close)

    app = FastAPI(
        title="livedraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    config = server.config
    app.add_middleware(Gate, api_keys=config.api_keys, admin_key=config.admin_key, max_bytes=config.max_request_bytes)
    app.include_router(admin_routes(lambda: server.service.state if server.phase == "ready" else None))
    _answer_errors(app)

    @app.get("/health")
    async def health() -> Response:
        fleet = server.service.fleet
        is_up = server.phase == "ready" and fleet is not None and bool(fleet.ready())
        phase = "no replica is up" if server.phase == "ready" and not is_up else server.phase
        return JSONResponse({"status": phase}, status_code=200 if is_up else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await run_in_threadpool(render, server.service, dict(server.answers), server.num_open)
        return Response(text, media_type="text/plain; version=0.0.4")

    app.add_route("/{path:path}", _route(server), methods=["GET", "POST", "DELETE"], include_in_schema=False)
    return app


def _route(server: VllmServer) -> Callable[[Request], Awaitable[Response]]:
    async def forward(request: Request) -> Response:
        try:
            return await server.forward(request)
        except ApiError as error:
            server.answers[error.status] = server.answers.get(error.status, 0) + 1
            return error_response(error)

    return forward


def _replica_app(service: VllmService) -> FastAPI:
    """Traces in, draft weights out; each request shows the replicas' key."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _answer_errors(app)

    def require_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, service.replica_key.encode()):
            raise ApiError(401, "The replica key is missing or wrong.", code="invalid_replica_key")

    @app.post("/replica/traces")
    async def traces(request: Request) -> Response:
        require_key(request)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > _MAX_SHIPMENT_BYTES:
                raise ApiError(413, "The shipment is too large.")
            parts.append(part)
        if not service.take(b"".join(parts)):
            raise ApiError(503, "Busy; send it again.", retry_after_seconds=1)
        return Response(status_code=204)

    @app.get("/replica/versions/{version_id}")
    async def version(version_id: str, request: Request) -> Response:
        require_key(request)
        file = await run_in_threadpool(service.weights_file, version_id)
        if file is None:
            raise ApiError(404, "There is no such version.")
        return FileResponse(file, media_type="application/octet-stream")

    return app


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, f"{error.detail}."))
