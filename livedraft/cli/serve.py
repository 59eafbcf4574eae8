"""`livedraft serve`: the application under uvicorn, a banner when the model is there, a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import uvicorn

from livedraft.cli.status_line import StatusLine
from livedraft.config import ServerConfig
from livedraft.records import UserError
from livedraft.server.app import Phase, Server, create_app
from livedraft.server.local import open_llm, serve_llm
from livedraft.settings import Settings

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 5


def run(settings: Settings, *, is_verbose: bool) -> None:
    """Until SIGTERM or SIGINT. Raises UserError when the model does not load or the address is taken."""
    server = Server(settings.server, lambda: serve_llm(open_llm(settings, learn=settings.model.learn), settings))

    def status_line() -> Callable[[], str | None]:
        assert server.served is not None
        return StatusLine(server.served).next

    listen(create_app(server), server, is_verbose=is_verbose, status_line=status_line)


class Described(Protocol):
    """What the banner says of what is served."""

    @property
    def name(self) -> str: ...

    @property
    def banner(self) -> Sequence[tuple[str, str]]: ...


class Serving(Protocol):
    """The state behind an application."""

    config: ServerConfig
    phase: Phase
    load_error: BaseException | None
    num_open: int

    @property
    def served(self) -> Described | None: ...

    def drain(self) -> None: ...


def listen(
    app: Any, server: Serving, *, is_verbose: bool, status_line: Callable[[], Callable[[], str | None]] | None = None
) -> None:
    """Run an application that loads while it listens; with a status line it also has a dashboard. Raises as `run`."""
    if is_verbose:
        for name in ("livedraft", "livedraft.access"):
            logging.getLogger(name).setLevel(logging.INFO)
    config = server.config
    # uvicorn's own access log would name clients; `Gate` writes one line a request instead.
    http = _DrainingServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        ),
        server,
        status_line,
    )
    try:
        http.run()
    except SystemExit as error:  # uvicorn's way to say that it could not listen; the reason is logged
        raise UserError(f"{config.host}:{config.port} cannot be listened on; give another --host or --port.") from error
    if server.load_error is not None:
        raise server.load_error


class _DrainingServer(uvicorn.Server):
    """SIGTERM: no new requests, running ones finish. SIGINT, a second SIGTERM, or drain_timeout_seconds later: the end."""

    def __init__(
        self, config: uvicorn.Config, server: Serving, status_line: Callable[[], Callable[[], str | None]] | None
    ) -> None:
        super().__init__(config)
        self._server, self._status_line = server, status_line
        self._started = time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.phase in ("draining", "failed") or sig == signal.SIGINT:
            self.should_exit = True
        self._server.drain()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        server = self._server
        while server.phase == "loading":
            await asyncio.sleep(_POLL_SECONDS)
        if server.phase == "ready":
            self._print_banner(time.monotonic() - self._started)
            if server.config.status_seconds and self._status_line is not None:
                line = self._status_line()
                self._reporting = asyncio.ensure_future(self._report(line, server.config.status_seconds))
        while server.phase == "ready":
            await asyncio.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + server.config.drain_timeout_seconds
        while server.num_open and time.monotonic() < deadline and not self.should_exit:
            await asyncio.sleep(_POLL_SECONDS)
        self.should_exit = True

    async def _report(self, line: Callable[[], str | None], seconds: float) -> None:
        """The status line while requests run; off the event loop, because it asks the state folder."""
        while True:
            await asyncio.sleep(seconds)
            text = await asyncio.to_thread(line)
            if text is not None:
                print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)

    def _print_banner(self, load_seconds: float) -> None:
        served, config = self._server.served, self._server.config
        assert served is not None
        port = self.servers[0].sockets[0].getsockname()[1]
        url = f"http://{_in_url(config.host)}:{port}"
        lines = [
            *served.banner,
            ("address", f"{url}/v1 (OpenAI's API), {url}/metrics, {url}/health"),
            *([("dashboard", f"{url}/")] if self._status_line is not None else []),
            ("access", "API key needed for /v1" if config.api_keys else _openness(config)),
            ("loaded", f"in {load_seconds:.1f} s"),
        ]
        for name, text in lines:
            print(f"{name:>9}  {text}")
        key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
        print(
            f"\ncurl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d "
            f'\'{{"model": "{served.name}", "messages": [{{"role": "user", "content": "Name three rivers."}}]}}\'',
            flush=True,
        )
        sys.stdout.flush()


def _in_url(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _openness(config: ServerConfig) -> str:
    is_local = config.host in ("127.0.0.1", "localhost", "::1")
    return "this machine only, no key" if is_local else "open to the network without a key; set one with --api-key"
