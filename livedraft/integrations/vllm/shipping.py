"""From a worker to the parent: finished requests, a few together, by HTTP from a thread of its own. Bounded; what does not fit
is dropped and counted.

Runs inside vLLM: standard library and `wire` only.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
from urllib.parse import urlsplit

from livedraft.integrations.vllm.wire import TappedRequest, pack

MAX_WAITING_REQUESTS = 256
REQUESTS_PER_SHIPMENT = 8
MAX_WAIT_SECONDS = 0.25
"""A shipment leaves when it is full, or this long after its first request."""
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.2, 10.0
_TIMEOUT_SECONDS = 10.0


class Shipper:
    """`offer` never blocks. The parent answering 429 or 503, or not at all, makes it wait and try again: that is the
    back-pressure; a request is refused for good with any other answer."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = urlsplit(url), token
        self._queue: queue.Queue[TappedRequest | None] = queue.Queue(maxsize=MAX_WAITING_REQUESTS)
        self._closing = threading.Event()
        self.num_shipped = self.num_dropped = self.num_bytes = 0
        self.last_problem = ""
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._ship_until_closed, name="livedraft-shipper", daemon=True)
        self._thread.start()

    def offer(self, request: TappedRequest) -> None:
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """What waits is sent if the parent takes it at once."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(5.0)

    def _ship_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch: list[TappedRequest] = []
            deadline = float("inf")
            while len(batch) < REQUESTS_PER_SHIPMENT:
                try:
                    wait = None if not batch else max(0.0, deadline - time.monotonic())
                    request = self._queue.get(timeout=wait)
                except queue.Empty:
                    break
                if request is None:
                    is_open = False
                    break
                if not batch:
                    deadline = time.monotonic() + MAX_WAIT_SECONDS
                batch.append(request)
            if batch:
                self._deliver(batch)
        self._hang_up()

    def _deliver(self, batch: list[TappedRequest]) -> None:
        body = pack(batch)
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            status = self._post(body)
            if status is not None and status < 300:
                self.num_shipped += len(batch)
                self.num_bytes += len(body)
                return
            is_refused = status is not None and status not in (429, 503)
            if is_refused or self._closing.wait(backoff):
                self.num_dropped += len(batch)
                return
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    def _post(self, body: bytes) -> int | None:
        """The answer's status; None when there was none."""
        try:
            if self._connection is None:
                kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
                assert self._url.hostname is not None
                self._connection = kind(self._url.hostname, self._url.port, timeout=_TIMEOUT_SECONDS)
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/octet-stream"}
            self._connection.request("POST", self._url.path, body=body, headers=headers)
            response = self._connection.getresponse()
            text = response.read()
            if response.status >= 300:
                self.last_problem = f"{response.status} {text[:200]!r}"
            return response.status
        except (OSError, http.client.HTTPException) as error:
            self.last_problem = f"{type(error).__name__}: {error}"
            self._hang_up()
            return None

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
