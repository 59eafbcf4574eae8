"""The HTTP application: OpenAI's endpoints over any `Backend`, health, metrics, the dashboard.

A request's way: `Gate` (id, key, size) -> validation -> `openai_api` (template, tokens, limits; off the event loop) -> the
backend's queue -> updates, one a round -> text and JSON here, on the event loop -> the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from livedraft import __version__
from livedraft.config import ROUTE_NAME_RULE, ServerConfig, is_route_name
from livedraft.records import RouteHints, Update
from livedraft.server.admin import admin_routes
from livedraft.server.dashboard import dashboard_routes
from livedraft.server.errors import ApiError, error_body, error_response, from_validation
from livedraft.server.gate import Gate, Receive, Scope, Send
from livedraft.server.handover import Handover, Queue
from livedraft.server.live import Live
from livedraft.server.metrics import Metrics
from livedraft.server.openai_api import Served, chat_job, completion_job
from livedraft.server.responses import Job
from livedraft.server.schemas import ChatCompletionRequest, CompletionRequest, Sampled

logger = logging.getLogger("livedraft")
STORE_HEADER, ROUTE_HEADER = "x-livedraft-store", "x-livedraft-route"
Phase = Literal["loading", "ready", "draining", "failed"]
T = TypeVar("T")
_RETRY_SECONDS = 2
_NUM_PREPARING = 4
_SENDING_SECONDS = 30.0
"""For the client to read what is left, after request_timeout_seconds."""


class Server:
    """The state behind the routes. Everything but `load` and the backend runs on the event loop, so counts need no lock."""

    def __init__(self, config: ServerConfig, load: Callable[[], Served]) -> None:
        self.config = config
        self._load = load
        self.served: Served | None = None
        self.phase: Phase = "loading"
        self.load_error: BaseException | None = None
        self.metrics = Metrics(lambda: self.served)
        self.live = Live(config, lambda: self.served, lambda: self.phase)
        self.num_open = 0
        """Choices being generated or waiting."""
        self._handover: Handover | None = None
        # Templates, tokenising and grammars: not in the pool that /metrics and the shutdown need, and never all cores' worth.
        self._preparing = ThreadPoolExecutor(max_workers=_NUM_PREPARING, thread_name_prefix="prepare")

    async def start(self) -> None:
        self._handover = Handover(asyncio.get_running_loop())
        try:
            self.served = await in_thread_of_its_own(self._load)
        except BaseException as error:
            self.phase, self.load_error = "failed", error
            raise
        if self.phase == "loading":
            self.phase = "ready"

    def stop_preparing(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """From now on nothing new is taken; what runs goes on."""
        self.phase = "draining"

    def ready(self) -> Served:
        """Raises ApiError 503 while loading or draining."""
        if self.phase != "ready" or self.served is None:
            raise ApiError(503, f"The server is {self.phase}; try again.", retry_after_seconds=_RETRY_SECONDS)
        return self.served

    def take_places(self, num_choices: int, served: Served) -> Places:
        """Room in the queue, or ApiError 429; 400 for what would never fit."""
        limit = served.max_num_seqs + self.config.max_queue
        if num_choices > limit:
            message = f"n times the prompts makes {num_choices} completions; this server queues {limit} at most."
            raise ApiError(400, message, param="n")
        if self.num_open + num_choices > limit:
            raise ApiError(
                429,
                f"All {limit} places are taken; try again later.",
                code="queue_full",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self.num_open += num_choices
        return Places(self, num_choices)

    async def updates(self, job: Job, served: Served, places: Places) -> AsyncGenerator[tuple[int, Update], None]:
        """Run a job; whatever ends this early (client gone, timeout, error) cancels the rest of it."""
        assert self._handover is not None
        queue = Queue(on_finish=places.give_back_one)
        arrived = time.perf_counter()
        seconds = self.config.request_timeout_seconds
        timer = asyncio.get_running_loop().call_later(seconds, queue.put_nowait, (0, None, 0.0))
        last_seen = [0.0] * len(job.requests)
        unfinished = set(range(len(job.requests)))
        try:
            for index, request in enumerate(job.requests):
                served.backend.submit(request, partial(self._handover.deliver, queue, index))
            while unfinished:
                index, update, now = await queue.get()
                if update is None:  # the timer
                    message = f"The request took longer than {seconds:g} seconds and was ended."
                    raise ApiError(504, message, code="timeout")
                self._observe(update, now, arrived, last_seen[index])
                last_seen[index] = now if update.token_ids else last_seen[index]
                if update.finish_reason is not None:
                    unfinished.discard(index)
                yield index, update
        finally:
            timer.cancel()
            for index in unfinished:
                served.backend.cancel(job.requests[index].id)

    def _observe(self, update: Update, now: float, arrived: float, last_seen: float) -> None:
        num_tokens = len(update.token_ids)
        if num_tokens and last_seen == 0.0:
            self.metrics.time_to_first_token.observe(now - arrived)
            self.live.time_to_first_token.add(now - arrived)
        elif num_tokens:
            gap = (now - last_seen) / num_tokens
            for _ in range(num_tokens):
                self.metrics.inter_token_latency.observe(gap)
                self.live.inter_token_latency.add(gap)
        if update.counts is not None:
            self.metrics.request_latency.observe(now - arrived)
            self.metrics.queue_time.observe(update.counts.queued_seconds)

    async def complete(self, prepare: Callable[..., Job], body: Sampled, request: Request) -> Response:
        """From a valid body to the HTTP response. Raises ApiError. Its places in the queue are taken before the work of
        preparing it and come back in every case."""
        served = self.ready()
        if not may_store(request):
            body = body.model_copy(update={"store": False})
        hints = _route_hints(body, request)
        places = self.take_places(body.num_completions, served)
        response: Response | None = None
        try:
            work = partial(
                prepare,
                body,
                served,
                id=request.state.request_id,
                hints=hints,
                reports_counts=self.config.per_request_metrics,
            )
            job = await asyncio.get_running_loop().run_in_executor(self._preparing, work)
            if not job.is_stream:
                return await self._answer(job, served, places, request)
            seconds = self.config.request_timeout_seconds + _SENDING_SECONDS
            response = _Stream(self._events(job, served, places), seconds, on_end=places.give_back)
            return response
        finally:
            if response is None:  # a stream gives its places back itself, at its end
                places.give_back()

    async def _answer(self, job: Job, served: Served, places: Places, request: Request) -> Response:
        whole = asyncio.ensure_future(self._whole(job, served, places))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            whole.cancel()  # no effect on one that is done
        try:
            return JSONResponse(await whole)
        except asyncio.CancelledError:
            return Response(status_code=499)  # the client is gone; nobody reads this

    async def _whole(self, job: Job, served: Served, places: Places) -> dict[str, Any]:
        async with contextlib.aclosing(self.updates(job, served, places)) as updates:
            async for index, update in updates:
                job.choices[index].take(update)
        return job.response()

    async def _events(self, job: Job, served: Served, places: Places) -> AsyncIterator[str]:
        try:
            async with contextlib.aclosing(self.updates(job, served, places)) as updates:
                async for index, update in updates:
                    pieces = job.choices[index].take_pieces(update)
                    if pieces:
                        yield "".join(job.chunk([piece]) for piece in pieces)
            last = job.last_chunk()
            if last is not None:
                yield last
        except ApiError as error:  # the status line is long gone: say it in the stream
            yield f"data: {json.dumps(error_body(error))}\n\n"
        yield "data: [DONE]\n\n"


class Places:
    """What one HTTP request holds of the queue: a place comes back as soon as its completion is made, however slowly the client
    reads, and the rest at the end."""

    def __init__(self, server: Server, count: int) -> None:
        self._server, self._count = server, count

    def give_back_one(self) -> None:
        if self._count:
            self._count -= 1
            self._server.num_open -= 1

    def give_back(self) -> None:
        while self._count:
            self.give_back_one()


class _Stream(StreamingResponse):
    """Server-sent events, cut off when the client has not read them after `seconds`. `on_end` runs also when it left before
    the first one was asked for."""

    def __init__(self, events: AsyncIterator[str], seconds: float, *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_UNBUFFERED)
        self._seconds, self._on_end = seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.wait_for(super().__call__(scope, receive, send), self._seconds)
        except asyncio.TimeoutError:
            logger.warning(
                "Request %s: its client did not read; the connection is given up.", scope["state"]["request_id"]
            )
        finally:
            self._on_end()


def may_store(request: Request) -> bool:
    """The header is for whoever stands between client and server, a gateway or a proxy; either may say no. Raises ApiError."""
    value = request.headers.get(STORE_HEADER, "true").strip().lower()
    if value not in ("true", "false"):
        raise ApiError(400, f"The header {STORE_HEADER} must be true or false, got {value[:20]!r}.")
    return value == "true"


def _route_hints(body: Sampled, request: Request) -> RouteHints:
    """Raises ApiError for a name that is none."""
    named = request.headers.get(ROUTE_HEADER, "") or body.metadata.get("route", "")
    if named and not is_route_name(named):
        raise ApiError(400, f"The route must be {ROUTE_NAME_RULE}, got {named[:40]!r}.", param="metadata")
    return RouteHints(named=named, api_key=request.state.api_key)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def in_thread_of_its_own(function: Callable[[], T]) -> T:
    """For loading models: the thread ends, and with it the OpenMP pool that loading made.

    A pool that lives on makes the runtime count more threads than cores, and then the engine's own pool sleeps between
    operations instead of spinning: a third of the speed at batch 1.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, function)
        finally:
            executor.shutdown(wait=False)


_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {}}}
    for status, text in {
        400: "Something in the request cannot be honoured; the error names the field.",
        401: "The API key is missing or wrong.",
        404: "No such model.",
        413: "The body is too large.",
        422: "Not used: validation errors answer 400.",
        429: "The queue is full.",
        503: "Loading or draining.",
    }.items()
}


def create_app(server: Server, *, closes_served: bool = True) -> FastAPI:
    """The application around a server; starting it begins to load the model, and serves /health meanwhile. `closes_served`:
    its end is the model's end too."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(server.start())
        loading.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # whoever runs the server reports it
        sampling = asyncio.ensure_future(server.live.run())
        yield
        if not loading.done():
            await asyncio.wait({loading})
        server.stop_preparing()
        sampling.cancel()
        await asyncio.wait({sampling})
        await server.live.save()
        if server.served is not None and closes_served:
            await run_in_threadpool(server.served.close)

    app = FastAPI(title="livedraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    config = server.config
    app.add_middleware(Gate, api_keys=config.api_keys, admin_key=config.admin_key, max_bytes=config.max_request_bytes)
    app.include_router(admin_routes(lambda: server.served.state if server.served else None))
    app.include_router(dashboard_routes(server.live))

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
        return error_response(from_validation(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, f"{error.detail}."))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": server.phase}, status_code=200 if server.phase == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await run_in_threadpool(server.metrics.render), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(server.ready())]}

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> dict[str, Any]:
        served = server.ready()
        if model != served.name:
            raise ApiError(404, f"There is no model {model!r} here.", param="model", code="model_not_found")
        return _model_card(served)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await server.complete(chat_job, body, request)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.complete(completion_job, body, request)

    return app


def _model_card(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "livedraft",
        "max_model_len": served.backend.max_model_len,
    }
