"""The shipper against a real HTTP server that can be told how to answer."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from livedraft.integrations.vllm import shipping
from livedraft.integrations.vllm.shipping import Shipper
from livedraft.integrations.vllm.wire import unpack
from tests.integrations.vllm.tapped import tapped


@pytest.fixture
def parent(monkeypatch):
    monkeypatch.setattr(shipping, "FIRST_BACKOFF_SECONDS", 0.01)
    received, answers, keys = [], [], []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = answers.pop(0) if answers else 204
            keys.append(self.headers["Authorization"])
            if status < 300:
                received.extend(unpack(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/replica/traces"
    yield url, received, answers, keys
    server.shutdown()
    server.server_close()


def _until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_arrive_together_under_the_key(parent):
    url, received, _, keys = parent
    shipper = Shipper(url, "secret")
    for n in range(5):
        shipper.offer(tapped(f"r{n}"))
    _until(lambda: len(received) == 5)
    assert {one.id for one in received} == {f"r{n}" for n in range(5)}
    assert set(keys) == {"Bearer secret"} and len(keys) <= 2
    _until(lambda: shipper.num_shipped == 5)
    shipper.close()


def test_a_busy_parent_is_waited_for_and_one_that_refuses_is_not(parent):
    url, received, answers, _ = parent
    answers += [503, 429, 204, 401]
    shipper = Shipper(url, "secret")
    shipper.offer(tapped("waits"))
    _until(lambda: received)
    assert shipper.num_dropped == 0
    shipper.offer(tapped("refused"))
    _until(lambda: shipper.num_dropped == 1)
    assert "401" in shipper.last_problem
    shipper.close()


def test_with_nobody_there_a_bounded_number_waits(monkeypatch):
    monkeypatch.setattr(shipping, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(shipping, "LONGEST_BACKOFF_SECONDS", 0.05)
    shipper = Shipper("http://127.0.0.1:9/replica/traces", "secret")
    for n in range(shipping.MAX_WAITING_REQUESTS + 20):
        shipper.offer(tapped(f"r{n}"))
    assert 0 < shipper.num_dropped <= 20
    started = time.monotonic()
    shipper._closing.set()
    shipper._thread.join(5) if shipper._queue.empty() else None
    assert time.monotonic() - started < 5
