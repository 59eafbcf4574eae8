"""From a replica's shipment to the trace store, without a replica."""

import threading
import time
from types import SimpleNamespace

import pytest

from livedraft.config import ServedModelConfig, VllmConfig
from livedraft.integrations.vllm.service import VllmService
from livedraft.integrations.vllm.traces import Known
from livedraft.integrations.vllm.wire import pack
from livedraft.learning.capture import Capture
from livedraft.learning.store import TraceStore
from livedraft.settings import Settings
from tests.integrations.vllm.tapped import tapped

ID = "livedraft-" + "0" * 32


@pytest.fixture
def service(tmp_path):
    """Its unpacking half."""
    settings = Settings(model=ServedModelConfig(name="m", state=str(tmp_path)))
    one = VllmService(settings, VllmConfig(python="p"), url="http://127.0.0.1:1")
    one.target = SimpleNamespace(fingerprint="target")
    one.capture = Capture(TraceStore(tmp_path), one.events)
    one._unpacker = threading.Thread(target=one._unpack, daemon=True)
    yield one
    if not one._unpacker.is_alive():
        one._unpacker.start()
    one.close()


def _rows(service, count: int):
    deadline = time.monotonic() + 10
    while len(rows := TraceStore(service.state).rows()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return rows


def test_known_requests_become_traces_and_others_are_counted(service):
    service._unpacker.start()
    service.known.add(ID, Known(route="default", conversation_key="1a", client_key="", arrived_at=time.time()))
    assert service.take(pack([tapped(), tapped("somebody-elses")]))
    (row,) = _rows(service, 1)
    assert (row.draft_version, row.num_output_tokens) == ("v1", 3)
    trace = TraceStore(service.state).read(row)
    assert trace.output_token_ids == [4, 5, 6] and trace.target_fingerprint == "target"
    assert service.num_unknown == 1


def test_what_is_no_shipment_is_counted_and_the_next_one_is_taken(service):
    service._unpacker.start()
    service.known.add(ID, Known(route="default", conversation_key="1a", client_key="", arrived_at=time.time()))
    assert service.take(b"nonsense") and service.take(pack([tapped()]))
    _rows(service, 1)
    assert service.num_bad_shipments == 1


def test_replicas_are_told_to_wait_when_too_much_waits(service):
    accepted = [service.take(b"x") for _ in range(40)]
    assert accepted.count(False) == 24  # nobody unpacks yet


def test_without_learning_nothing_is_kept(service):
    capture, service.capture = service.capture, None
    assert service.take(pack([tapped()])) and service._shipments.empty()
    service.capture = capture
