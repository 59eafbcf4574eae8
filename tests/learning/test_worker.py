"""The worker's turns on the toy language, without a process; the process itself is in tests/e2e."""

import dataclasses

import pytest
import torch

from livedraft.config import LearningConfig
from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import save_draft
from livedraft.learning import gate
from livedraft.learning.capture import conversation_key
from livedraft.learning.store import TraceStore, is_held_out
from livedraft.learning.worker import Worker
from livedraft.records import DraftVersion, UserError
from tests.hf_folder import write_hf_folder
from tests.learning.toy import MODEL, one_layer_draft, served_traces


@pytest.fixture
def state(tmp_path):
    write_hf_folder(tmp_path / "model", MODEL.config, MODEL.tensors)
    draft = one_layer_draft()
    Registry(tmp_path / "state").publish(
        lambda path: save_draft(draft, path),
        DraftVersion(
            id=new_version_id(0),
            route="default",
            parent=None,
            sha256="",
            target_fingerprint=MODEL.fingerprint,
            tokenizer_fingerprint="t",
            num_layers=1,
            vocabulary_size=64,
            created_at=0.0,
        ),
        status="in_service",
    )
    return tmp_path / "state"


def worker(state, **settings):
    config = LearningConfig(**{"traces_per_chunk": 4, "max_passes": 8, **settings})
    return Worker(state=state, target=state.parent / "model", route="default", config=config, max_positions=128)


def serve_into(state, count, first=0):
    version = Registry(state).in_service("default").id
    traces = [
        dataclasses.replace(trace, draft_version=version, conversation_key=conversation_key([first + n], b"key"))
        for n, trace in enumerate(served_traces(count, first=first))
    ]
    TraceStore(state).append(traces)
    return traces


def run_until_idle(made, limit=500):
    for _ in range(limit):
        if not made.turn():
            return
    raise AssertionError("the worker never came to rest")


def test_it_scores_trains_freezes_waits_and_promotes(state):
    made = worker(state)
    first = made.in_service
    assert not made.turn()  # nothing to do
    traces = serve_into(state, 30)
    run_until_idle(made)
    rows = TraceStore(state).rows()
    assert all(row.alpha is not None for row in rows)
    held_out = {row.id for row in rows if row.is_held_out}
    assert {row.request_id for row in rows if row.is_held_out} == {
        t.request_id for t in traces if is_held_out(t.conversation_key)
    }
    assert held_out
    # Held-out traces enter neither training nor the vocabulary's counts.
    assert not held_out & set(made.examples)
    assert not held_out & set(made.copies)
    assert all(copies <= 8 for copies in made.copies.values())
    assert made.candidate is not None  # frozen when idle, waiting for requests it has not seen
    serve_into(state, 20, first=30)
    run_until_idle(made)
    assert made.in_service.id != first.id
    promoted = Registry(state).in_service("default")
    assert promoted == made.in_service
    decisions = [row["decision"] for row in Registry(state).versions() if row["decision"]]
    assert any(decision["promote"] and decision["candidate_alpha"] > decision["parent_alpha"] for decision in decisions)
    assert decisions[0]["alpha"] > 0


def test_evidence_is_never_what_the_candidate_trained_on(state):
    made = worker(state)
    serve_into(state, 30)
    run_until_idle(made)
    evidence = {example.trace_id for example in made._evidence(made.candidate.last_trace_id)}
    trained = {trace_id for trace_id, copies in made.copies.items() if copies}
    assert trained
    assert not evidence & trained


def test_a_sabotaged_candidate_is_rejected_and_service_stays(state):
    made = worker(state)
    first = made.in_service
    serve_into(state, 20)
    run_until_idle(made)
    assert made.candidate is not None
    with torch.no_grad():
        for tensor in made.drafts[made.candidate.id].tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    sabotaged = made.candidate.id
    serve_into(state, 20, first=50)
    made._read_new_traces()
    made._score_new()
    assert made._test_candidate()
    assert made.in_service == first
    statuses = {row["id"]: row for row in Registry(state).versions()}
    assert statuses[sabotaged]["status"] == "rejected"
    assert statuses[sabotaged]["decision"]["num_requests"] >= gate.MIN_REQUESTS


def test_prequential_scores_are_the_serving_versions(state):
    """A trace is charged to the version that served it, also when a newer one is in service by then."""
    made = worker(state)
    old = made.in_service
    serve_into(state, 4)
    run_until_idle(made)
    alpha = TraceStore(state).rows()[0].alpha
    trained = made.trainer.snapshot()
    new = dataclasses.replace(old, id=new_version_id(7), parent=old.id)
    Registry(state).publish(lambda path: save_draft(trained, path), new)
    Registry(state).promote(new.id, "default", {"promote": True})
    again = [dataclasses.replace(t, draft_version=v) for t in served_traces(1) for v in (old.id, new.id)]
    TraceStore(state).append(again)
    run_until_idle(made)
    by_old, by_new = (row.alpha for row in TraceStore(state).rows()[-2:])
    assert by_old == pytest.approx(alpha, abs=1e-6)
    assert by_new != pytest.approx(alpha, abs=1e-3)


def test_a_state_without_a_draft_is_one_sentence(tmp_path):
    write_hf_folder(tmp_path / "model", MODEL.config, MODEL.tensors)
    (tmp_path / "state").mkdir()
    with pytest.raises(UserError, match="no draft in service"):
        worker(tmp_path / "state")


def test_it_steps_aside_between_micro_batches_while_serving_is_busy(state, monkeypatch):
    from livedraft.learning import worker as room

    slept = []
    made = worker(state)
    monkeypatch.setattr(
        room.time, "sleep", lambda seconds: (slept.append(seconds), made._yield_flag.__setitem__(0, len(slept) < 3))
    )
    made._yield_flag[0] = 1
    made._between()
    assert len(slept) == 3
    made._yield_flag[0] = 0
    made._between()
    assert len(slept) == 3
