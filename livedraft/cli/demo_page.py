"""`livedraft demo --open`: the server around the demo's own engine, on a free port of this machine, for its dashboard and for a
chat beside the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import uvicorn

from livedraft.config import ServedModelConfig, ServerConfig
from livedraft.llm import LLM
from livedraft.records import Backend, Request, Update
from livedraft.server.app import Server, create_app
from livedraft.server.local import serve_llm
from livedraft.settings import Settings

_POLL_SECONDS = 0.02


class DemoPage:
    """From here on the engine belongs to its loop, until `LLM.close`."""

    def __init__(self, llm: LLM, model: str) -> None:
        llm.loop()
        config = ServerConfig(port=0)
        settings = Settings(model=ServedModelConfig(name=model), server=config)
        self._server = Server(config, lambda: serve_llm(llm, settings))
        self._http = uvicorn.Server(
            uvicorn.Config(
                create_app(self._server, closes_served=False), host=config.host, port=config.port, log_level="warning",
                access_log=False, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._http.run, name="demo-page", daemon=True)

    def __enter__(self) -> DemoPage:
        self._thread.start()
        while not (self._http.started and self._server.phase == "ready"):
            if not self._thread.is_alive():
                raise RuntimeError("The dashboard's server ended before it was ready.")
            time.sleep(_POLL_SECONDS)
        self.url = f"http://127.0.0.1:{self._http.servers[0].sockets[0].getsockname()[1]}/"
        return self

    def freeze(self) -> None:
        """What it shows now stays, the state folder's events aside, and no chat is taken: the engine is wanted elsewhere."""
        served = self._server.served
        assert served is not None
        learning = served.learning()
        self._server.served = replace(served, backend=_Frozen(served.backend), learning=lambda: learning)

    def close(self) -> None:
        """Whoever looks keeps what the page shows. Safe to call twice."""
        self._server.drain()
        self._http.should_exit = True
        self._thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Frozen:
    """A `Backend` as it was last, without requests."""

    def __init__(self, backend: Backend) -> None:
        self.max_model_len, self.vocabulary_size = backend.max_model_len, backend.vocabulary_size
        self.cancel = backend.cancel
        self._snapshot = backend.snapshot() | {"num_requests_running": 0, "num_requests_waiting": 0}

    def check(self, request: Request) -> None:
        raise ValueError("The demo measures speed now and takes no chat; `livedraft serve` does.")

    def submit(self, request: Request, deliver: Callable[[Update], None]) -> None:
        self.check(request)

    def snapshot(self) -> dict[str, Any]:
        return self._snapshot

    def close(self) -> None:
        pass


def serve_together(llm: LLM, requests: Sequence[Request], after_round: Callable[[], None]) -> list[list[int]]:
    """The requests' output tokens, in order; through the engine's loop where one has been started."""
    if not llm.has_loop:
        states = llm.add(requests)
        llm.run(after_round=after_round)
        return [state.output_token_ids for state in states]
    outputs: list[list[int]] = [[] for _ in requests]
    is_done = [threading.Event() for _ in requests]

    def take(index: int, update: Update) -> None:
        outputs[index] += update.token_ids
        if update.finish_reason is not None:
            is_done[index].set()

    for index, request in enumerate(requests):
        llm.loop().submit(request, partial(take, index))
    while not all(event.is_set() for event in is_done):
        after_round()
        time.sleep(_POLL_SECONDS)
    return outputs
