"""The worker's turns on the toy language, without a process; the process itself is in tests/e2e."""

import dataclasses
import shutil
import time

import pytest
import torch

from livedraft.config import OSD_SETTINGS, LearningConfig
from livedraft.drafts.database import read_events, read_status, set_control
from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import draft_from_target, save_draft
from livedraft.events import described
from livedraft.learning import gate, pacing
from livedraft.learning import worker as worker_room
from livedraft.learning.batches import example_from_trace
from livedraft.learning.capture import conversation_key
from livedraft.learning.drift import DriftWatch
from livedraft.learning.store import TraceStore
from livedraft.learning.worker import Worker
from livedraft.records import UserError, is_held_out
from tests.hf_folder import write_hf_folder
from tests.learning.toy import MODEL, served_traces


def worker(state, has_had_its_share=lambda _seconds: False, **settings):
    defaults = {"traces_per_chunk": 4, "max_passes": 8, "learning_rate": 3e-3, "replay_spacing": 0.0, "warmup_steps": 0}
    config = LearningConfig(**{**defaults, **settings})
    return Worker(
        state=state, target=state.parent / "model", route="default", config=config, max_positions=128,
        has_had_its_share=has_had_its_share,
    )  # fmt: skip


def serve_into(state, count, first=0):
    version = Registry(state).in_service("default").id
    traces = [
        dataclasses.replace(trace, draft_version=version, conversation_key=conversation_key([first + n], b"key"))
        for n, trace in enumerate(served_traces(count, first=first))
    ]
    TraceStore(state).append(traces)
    return traces


def run_until_idle(made, limit=500):
    """A canary is confirmed as soon as there is one: nobody serves here."""
    for _ in range(limit):
        if not made.turn():
            return
        canary = made.registry.canary("default")
        if canary is not None:
            made.registry.serve(canary.id, "default", {})
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
    assert not held_out & set(made.memory.examples)
    assert not held_out & set(made.memory.copies)
    assert all(copies <= 8 for copies in made.memory.copies.values())
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
    evidence = {example.trace_id for example in made.memory.evidence(made.candidate.last_trace_id)}
    trained = {trace_id for trace_id, copies in made.memory.copies.items() if copies}
    assert trained
    assert not evidence & trained


def test_a_sabotaged_candidate_is_rejected_and_service_stays(state):
    made = worker(state)
    first = made.in_service
    serve_into(state, 20)
    run_until_idle(made)
    assert made.candidate is not None
    with torch.no_grad():
        for tensor in made._draft(made.candidate.id).tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    sabotaged = made.candidate.id
    serve_into(state, 20, first=50)
    made._read_new_traces()
    while made._score_new():
        pass
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
    Registry(state).serve(new.id, "default", {"promote": True})
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


# --- operators, bad steps, kills ------------------------------------------------------------------------------------


def test_a_restart_goes_on_from_the_checkpoint_and_trains_nothing_twice(state):
    made = worker(state)
    serve_into(state, 12)
    run_until_idle(made)
    made.checkpoint()
    steps = made.trainer.num_steps
    assert steps > 3
    again = worker(state)
    assert again.trainer.num_steps == steps
    for name, parameter in made.trainer.parameters.items():
        assert torch.equal(again.trainer.parameters[name], parameter)
        for part in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(
                again.trainer.optimizer.state[again.trainer.parameters[name]][part],
                made.trainer.optimizer.state[parameter][part],
            )
    run_until_idle(again)
    assert again.trainer.num_steps == steps  # every copy of every prompt was used up before
    assert again.memory.copies == made.memory.copies
    assert max(again.memory.copies.values()) <= 8
    serve_into(state, 8, first=100)
    run_until_idle(again)
    assert again.trainer.num_steps > steps


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100])
def test_a_damaged_checkpoint_is_said_and_training_starts_from_the_version_in_service(state, content):
    (state / "trainer.checkpoint.safetensors").write_bytes(content)
    made = worker(state)
    assert "cannot be read" in made.reports.last_problem
    serve_into(state, 8)
    run_until_idle(made)
    assert made.trainer.num_steps > 0


def test_a_step_that_would_ruin_the_weights_is_not_taken_and_three_restart_from_service(state, monkeypatch):
    made = worker(state)
    serve_into(state, 8)
    made._read_new_traces()
    made._score_new()
    before = {name: tensor.clone() for name, tensor in made.trainer.averaged.items()}
    made.trainer.parameters["head"].data[0, 0] = torch.nan
    batch = made.memory.fresh[:4]
    for count in (1, 2):
        made._step(batch)
        assert made.num_bad_steps == count
        assert "not finite" in made.reports.last_problem
    made._step(batch)
    assert "starts again" in made.reports.last_problem
    assert torch.isfinite(made.trainer.parameters["head"]).all()
    for name, tensor in made.trainer.averaged.items():
        assert torch.equal(tensor, before[name])
    made._step(batch)
    assert made.num_bad_steps == 0
    assert made.trainer.num_steps == 1


def test_paused_is_paused_and_now_is_now(state):
    made = worker(state, traces_per_candidate=1000)
    set_control(state, "paused", 1)
    serve_into(state, 12)
    run_until_idle(made)
    assert read_status(state, "trainer")["status"] == "paused"
    assert made.trainer.num_steps == 0
    set_control(state, "paused", 0)
    run_until_idle(made)
    assert made.trainer.num_steps > 0
    assert made.num_candidates == 0
    set_control(state, "now")
    serve_into(state, 1, first=80)  # the next turn scores, and must not lose what was asked
    assert made.turn()
    assert made.num_candidates == 0
    run_until_idle(made)
    assert made.num_candidates == 1


def test_a_kill_does_not_lose_that_a_candidate_was_asked_for(state):
    made = worker(state, traces_per_candidate=1000)
    serve_into(state, 40)
    run_until_idle(made)
    made.checkpoint()
    set_control(state, "now")
    again = worker(state, traces_per_candidate=1000)  # the other one was killed before it saw it
    serve_into(state, 10, first=40)
    run_until_idle(again)
    assert again.num_candidates == 1
    again.checkpoint()
    third = worker(state, traces_per_candidate=1000)
    serve_into(state, 10, first=50)
    run_until_idle(third)
    assert third.num_candidates == 1  # asked once, offered once


def test_when_work_runs_out_nothing_is_left_to_lose(state, monkeypatch):
    """A kill costs what was learnt since the last checkpoint; an idle trainer has written one, and writes it once."""
    monkeypatch.setattr("livedraft.learning.worker.IDLE_CHECKPOINT_SECONDS", 0.0)
    made = worker(state, traces_per_candidate=1000)
    serve_into(state, 12)
    while made.safe_turn():
        pass
    again = worker(state, traces_per_candidate=1000)
    assert again.trainer.num_steps == made.trainer.num_steps > 0
    assert torch.equal(again.trainer.parameters["head"], made.trainer.parameters["head"])
    written = made._checkpoint_path.stat().st_mtime_ns
    made.safe_turn()
    assert made._checkpoint_path.stat().st_mtime_ns == written


def test_a_deletion_is_in_the_checkpoint_too(state):
    made = worker(state, traces_per_candidate=1000)
    serve_into(state, 12)
    run_until_idle(made)
    made.checkpoint()
    assert made.memory.copies
    made.store.delete_all()
    set_control(state, "forget")
    made.turn()
    again = worker(state, traces_per_candidate=1000)
    assert not again.memory.copies and again.trainer.num_steps == made.trainer.num_steps


def test_a_restart_remembers_how_the_served_version_was_doing(state):
    """Or a change of traffic beside a restart would go unseen."""
    made = worker(state, traces_per_candidate=1000)
    serve_into(state, 30)
    run_until_idle(made)
    made.checkpoint()
    assert len(made.drift.recent) == 16
    again = worker(state, traces_per_candidate=1000)
    assert again.drift.recent == pytest.approx(made.drift.recent)


def test_another_version_put_into_service_is_where_training_goes_on(state):
    made = worker(state)
    registry = Registry(state)
    serve_into(state, 8)
    run_until_idle(made)
    first = made.in_service
    better = dataclasses.replace(first, id=new_version_id(9), parent=first.id)
    weights = made.trainer.snapshot()
    registry.publish(lambda path: save_draft(weights, path), better)
    registry.serve(better.id, "default", {"promoted_by": "operator"})
    made.turn()
    assert made.in_service.id == better.id
    assert made.trainer.num_steps == 0
    assert torch.equal(made.trainer.parameters["head"], weights.tensors["head"])
    back = registry.roll_back("default", {"rolled_back_by": "operator"})
    assert back.id == first.id
    made.turn()
    assert made.in_service.id == first.id
    statuses = {row["id"]: row["status"] for row in registry.versions()}
    assert statuses == {first.id: "in_service", better.id: "rolled_back"}
    with pytest.raises(UserError, match="no earlier version"):
        registry.roll_back("default", {})


def test_deleted_traces_leave_the_running_trainer(state):
    made = worker(state)
    traces = [
        dataclasses.replace(t, client_key="ab" * 8 if n % 2 else "cd" * 8) for n, t in enumerate(served_traces(12))
    ]
    TraceStore(state).append(traces)
    run_until_idle(made)
    num_kept = len(made.memory.examples) + len(made.memory.held_out)
    assert num_kept == 12
    assert TraceStore(state).delete_client("ab" * 8) == 6
    set_control(state, "forget")
    made.turn()
    kept = [*made.memory.examples.values(), *made.memory.held_out.values(), *made.memory.fresh]
    assert len(kept) == 6
    assert {example.client_key for example in kept} == {"cd" * 8}
    run_until_idle(made)


def test_no_prompt_trains_more_than_max_passes_and_no_client_fills_a_batch(state):
    made = worker(state, max_passes=3)
    (one,) = served_traces(1)
    flood = [dataclasses.replace(one, request_id=f"x{n}", client_key="f" * 16) for n in range(20)]
    others = [dataclasses.replace(t, client_key=f"{n:016x}") for n, t in enumerate(served_traces(12, first=50))]
    TraceStore(state).append([*flood, *others])
    batches, right = [], made.trainer.step
    made.trainer.step = lambda batch, between, reference: (batches.append(batch), right(batch, between, reference))[1]
    run_until_idle(made)
    assert max(made.memory.copies.values()) <= 3
    for batch in batches:
        prompts = [example.prompt_key for example in batch[4:]]
        assert len(set(prompts)) == len(prompts)


def test_with_its_share_taken_it_scores_and_does_not_train_until_there_is_more(state):
    spent = [True]
    made = worker(state, has_had_its_share=lambda _seconds: spent[0])
    serve_into(state, 6)
    while made.turn():
        pass
    assert [row.alpha is not None for row in made.store.rows()] == [True] * 6
    assert made.trainer.num_steps == 0
    made.safe_turn()
    assert read_status(state, "trainer")["status"] == "resting"
    spent[0] = False
    run_until_idle(made)
    assert made.trainer.num_steps > 0


def test_it_says_how_long_ago_requests_ran(state):
    asked = []
    made = worker(state, has_had_its_share=lambda seconds: asked.append(seconds) or False)
    made.turn()
    assert asked == [float("inf")]
    made.pacing._yield_flag[0] = 1
    made.turn()
    assert asked[1] < 1.0


def test_a_drift_restarts_the_schedule_and_raises_the_fresh_share(state):
    made = worker(state)
    serve_into(state, 30)
    made._read_new_traces()
    while made._score_new():
        pass
    made.drift.clear()
    batches, right = [], made.trainer.step
    made.trainer.step = lambda batch, between, reference: (
        batches.append(len(batch)),
        right(batch, between, reference),
    )[1]
    for _ in range(4):
        made._train(*made.memory.next_batch())
    assert batches[-1] == 16  # four new and three replayed for each
    made.num_since_candidate, made.num_tests_since_promotion = 5, 3
    assert made.num_needed == 12
    made.memory.num_trained = 400
    assert made.num_needed == 100
    watch(made, 80, 0.5, first_id=1000)
    assert made.num_drifts == 0
    watch(made, 16, 0.45, first_id=1100)
    assert made.num_drifts == 0
    watch(made, 16, 0.2, first_id=1200)
    assert made.num_drifts == 1
    # The gate is asked anew, about the new traffic, and soon.
    assert made.memory.drift_id == 1200
    assert (made.num_since_candidate, made.num_tests_since_promotion, made.num_needed) == (0, 0, 12)
    assert made.trainer.schedule_step == 0
    made._train(*made.memory.next_batch())
    assert batches[-1] == 8  # one replayed for each
    watch(made, 20, 0.2, first_id=1300)
    assert made.num_drifts == 1


def watch(made, count, alpha, *, first_id):
    made._watch_for_drift({first_id + n: alpha for n in range(count)})


def test_after_a_drift_evidence_is_of_the_new_traffic_alone(state):
    made = worker(state)
    serve_into(state, 30)
    made._read_new_traces()
    while made._score_new():
        pass
    examples = made.memory.fresh
    made.memory.held_out = {one.trace_id: one for one in examples[:20]}
    made.memory.fresh = []
    assert len(made.memory.evidence(10_000)) == 20
    made.memory.fresh = examples[20:24] + examples[10:14]
    made.memory.prefer_new(since_id=examples[14].trace_id)
    assert [one.trace_id for one in made.memory.fresh[:4]] == [
        one.trace_id for one in examples[20:24]
    ]  # new ones first
    assert len(made.memory.evidence(0)) == 10  # what still waits of the old is none either
    made.memory.fresh = []
    assert [one.trace_id for one in made.memory.evidence(10_000)] == [one.trace_id for one in examples[14:20]]
    kept = made.memory.counters()
    other = worker(state).memory
    other.restore(kept)
    assert other.drift_id == examples[14].trace_id
    assert other.num_trained_at_drift == made.memory.num_trained
    for name in ("drift_id", "num_trained_at_drift", "num_after_drift"):  # a checkpoint from before they were kept
        del kept[name]
    other.restore(kept)
    assert other.drift_id == 0
    assert not other.is_drifting


@pytest.mark.parametrize("is_better", [True, False])
def test_when_earlier_traffic_comes_back_its_draft_is_tried_again(state, is_better):
    made = worker(state)
    serve_into(state, 40)
    made._read_new_traces()
    while made._score_new():
        pass
    made.drift.clear()
    ids = sorted(one.trace_id for one in (*made.memory.fresh, *made.memory.held_out.values()))
    served = made._draft(made.in_service.id)
    target = draft_from_target(MODEL, num_layers=MODEL.config.num_layers, token_ids=list(range(64)))
    useless = dataclasses.replace(served, tensors={n: 0.0 * t for n, t in served.tensors.items()})
    made.earlier.drafts = {"v8": useless, "v9": target if is_better else useless}
    watch(made, 80, 0.9, first_id=ids[0] - 1000)
    watch(made, 16, 0.1, first_id=ids[-16])
    made._try_earlier()  # 16 short answers are not enough evidence
    assert made.canary is None
    made.memory.drift_id = ids[-24]
    made._try_earlier()
    assert made.num_drifts == 1
    assert list(made.earlier.drafts) == ["v8", "v9", made.in_service.id]  # what serves now is remembered for next time
    assert made.earlier.drafts[made.in_service.id] is served
    assert made.earlier.untried == []
    assert (made.canary is not None) == is_better
    if is_better:
        row = made.registry.version(made.canary.id)
        assert row["status"] == "canary"
        assert row["decision"]["num_requests"] == 24
        assert row["decision"]["alpha"] > 0.9  # the target itself
        assert torch.equal(made.trainer.parameters["head"], target.tensors["head"])


def test_another_versions_acceptance_is_no_drift(state):
    made = worker(state)
    watch(made, 80, 0.5, first_id=1000)
    made._start_again("another version serves now")
    watch(made, 70, 0.2, first_id=2000)
    assert made.num_drifts == 0


def test_what_the_served_version_has_learnt_is_no_evidence_after_a_lost_checkpoint(state):
    serve_into(state, 20)
    registry = Registry(state)
    serving = registry.in_service("default")
    weights = registry.load(serving)
    version = registry.publish(
        lambda path: save_draft(weights, path),
        dataclasses.replace(serving, id="v9", last_trace_id=12),
        status="candidate",
    )
    registry.serve(version.id, "default", {})
    assert worker(state).memory.newest_trained_id == 12
    far = dataclasses.replace(serving, id="v10", last_trace_id=5000)  # of a database that is no more
    registry.publish(lambda path: save_draft(weights, path), far, status="candidate")
    registry.serve("v10", "default", {})
    assert worker(state).memory.newest_trained_id == 20


def test_a_candidate_of_the_old_traffic_is_dropped(state):
    made = worker(state)
    serve_into(state, 30)
    made._read_new_traces()
    while made._score_new():
        pass
    made.drift.clear()
    made._train(*made.memory.next_batch())
    made._freeze_candidate()
    version = made.candidate.id
    watch(made, 80, 0.5, first_id=1000)
    watch(made, 16, 0.1, first_id=1100)
    assert made.candidate is None
    assert made.registry.version(version)["status"] == "rejected"


# --- the canary, the breaker ----------------------------------------------------------------------------------------


def until_canary(made, first):
    """Serve until a candidate passes the gate; returns its id."""
    for start in range(first, first + 200, 10):
        serve_into(made.state, 10, first=start)
        for _ in range(500):
            if not made.turn():
                break
        if made.canary is not None:
            return made.canary.id
    raise AssertionError("nothing passed the gate")


def test_a_canary_is_waited_for_and_its_end_is_followed(state):
    made = worker(state)
    first = made.in_service
    canary = until_canary(made, 0)
    assert Registry(state).canary("default").id == canary
    sentence = described(next(event for event in read_events(state, limit=500) if event["event"] == "candidate_passed"))
    assert sentence.startswith(f"Candidate {canary} passed the gate: alpha ")
    assert made.in_service == first
    num_candidates = made.num_candidates
    serve_into(state, 20, first=300)
    while made.turn():
        pass
    assert made.num_candidates == num_candidates  # nothing new is offered meanwhile
    weights = made.trainer.parameters["head"].detach().clone()
    Registry(state).serve(canary, "default", {})
    made._follow_service()
    assert made.in_service.id == canary
    assert made.num_rolled_back == 0
    assert torch.equal(made.trainer.parameters["head"], weights)  # its own weights: training just goes on
    assert worker(state).canary is None


def as_if_passed(made):
    """The trainer's weights as they are, through the gate by hand."""
    made.candidate = None
    made._freeze_candidate()
    made.canary, made.candidate = made.candidate, None
    made.registry.start_canary(made.canary.id, {"alpha": 0.5})
    return made.canary.id


def test_a_rolled_back_canary_opens_the_breaker_and_one_that_stays_closes_it(state):
    made = worker(state, traces_per_candidate=4)
    first = made.in_service
    for number in (1, 2):
        serve_into(state, 20, first=100 * number)
        run_until_idle(made)
        canary = as_if_passed(made)
        usual = max(4, made.memory.num_trained // 4)
        Registry(state).withdraw(canary, {"live_rate": 0.0})
        made._follow_service()
        assert made.in_service == first
        assert made.num_rolled_back == number
        assert made.num_needed == usual * 2**number
        assert made.trainer.num_steps == 0  # what was learnt since is not trusted
        assert torch.equal(made.trainer.parameters["head"], made._draft(first.id).tensors["head"])
    made.checkpoint()
    assert worker(state).num_rolled_back == 2  # a restart does not close it
    made.num_rolled_back = 9
    assert made.num_needed == max(4, made.memory.num_trained // 4) * 32
    made.num_rolled_back = 2
    canary = as_if_passed(made)
    Registry(state).serve(canary, "default", {})
    made._follow_service()
    assert made.num_rolled_back == 2  # taking over is not staying
    serve_into(state, 60, first=1000)
    run_until_idle(made)
    assert made.num_rolled_back == 2
    serve_into(state, 8, first=2000)
    made._read_new_traces()
    made._score_new()
    assert made.num_rolled_back == 0
    events = [event for event in read_events(state, limit=500) if event["event"] == "training_restarted"]
    assert len(events) == 2
    assert "rolled back" in events[0]["reason"]


def test_a_version_rolled_back_out_of_service_opens_the_breaker_too(state):
    made = worker(state)
    first = made.in_service
    serve_into(state, 10)
    run_until_idle(made)
    canary = as_if_passed(made)
    registry = Registry(state)
    registry.serve(canary, "default", {})
    made._follow_service()
    registry.roll_back("default", {"live_rate": 0.1})
    made._follow_service()
    assert made.in_service.id == first.id
    assert made.num_rolled_back == 1


# --- trouble with the state folder ----------------------------------------------------------------------------------


def test_a_disk_that_is_full_costs_time_and_nothing_else(state, monkeypatch):
    made = worker(state)
    serve_into(state, 12)
    right = made.store.record_alpha

    def full(scores):
        raise UserError("The database failed (disk full).")

    monkeypatch.setattr(made.store, "record_alpha", full)
    with pytest.raises(UserError):
        made.turn()
    monkeypatch.setattr(made.store, "record_alpha", right)
    run_until_idle(made)
    assert all(row.alpha is not None for row in TraceStore(state).rows())
    assert made.memory.num_trained + len(made.memory.fresh) + len(made.memory.held_out) == 12


def test_a_turn_outlives_a_disk_that_is_full_and_says_it_once(state, monkeypatch):
    from livedraft.learning import worker as room

    made = worker(state)

    def turn():
        raise UserError("The database failed (disk full).")

    monkeypatch.setattr(made, "turn", turn)
    monkeypatch.setattr(room.time, "sleep", lambda seconds: None)
    assert [made.safe_turn() for _ in range(3)] == [False] * 3
    problems = [event for event in read_events(state) if event["event"] == "training_problem"]
    assert [event["reason"] for event in problems] == ["The database failed (disk full)."]


def test_a_damaged_shard_is_set_aside_with_an_event(state):
    made = worker(state)
    serve_into(state, 4)
    (shard,) = TraceStore(state).folder.glob("shard-*")
    shard.write_bytes(b"damaged")
    serve_into(state, 8, first=50)
    run_until_idle(made)
    assert [e["num_shards"] for e in read_events(state) if e["event"] == "shards_set_aside"] == [1]
    assert made.memory.num_trained > 0


def test_a_draft_too_large_for_the_machine_is_refused_with_the_number(state, monkeypatch):
    monkeypatch.setattr("livedraft.learning.trainer.available_memory_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"needs about .* GiB"):
        worker(state)


def test_a_loss_that_explodes_is_a_bad_step(state):
    made = worker(state, loss="forward_kl")
    serve_into(state, 8)
    made._read_new_traces()
    made._score_new()
    with torch.no_grad():
        made.trainer.parameters["head"] *= 1e4
    before = made.trainer.parameters["head"].detach().clone()
    made._step(made.memory.fresh[:4])
    assert "worse than a uniform guess" in made.reports.last_problem
    assert torch.equal(made.trainer.parameters["head"], before)


# --- choices --------------------------------------------------------------------------------------------------------


def test_the_rate_is_chosen_on_the_first_requests_and_no_candidate_is_offered_before(state):
    made = worker(state, learning_rate=None, traces_per_chunk=2)
    serve_into(state, 14)
    run_until_idle(made)
    assert made.rate_trial is not None
    assert made.num_candidates == 0
    serve_into(state, 10, first=50)
    run_until_idle(made)
    assert made.rate_trial is None
    (event,) = [event for event in read_events(state) if event["event"] == "rate_chosen"]
    assert event["rate"] == made.trainer.base_rate
    assert set(event["alphas"]) == {"0.003", "0.001"}
    assert made.num_candidates > 0


def test_passes_over_a_request_are_spread_unless_nothing_new_comes(state, monkeypatch):
    from livedraft.learning import worker as room

    made = worker(state, replay_spacing=0.9, max_passes=3)
    serve_into(state, 12)
    run_until_idle(made)
    assert set(made.memory.copies.values()) <= {1, 2}
    num_steps = made.trainer.num_steps
    now = room.time.monotonic()
    monkeypatch.setattr(room.time, "monotonic", lambda: now + 2 * room.LONG_IDLE_SECONDS)
    made.candidate = made.canary = None
    run_until_idle(made)
    assert made.trainer.num_steps > num_steps
    assert set(made.memory.copies.values()) == {3}


def test_osds_own_variant_takes_one_step_every_eight_requests_on_rejected_positions(state):
    made = worker(state, **OSD_SETTINGS)
    batches, right = [], made.trainer.step
    made.trainer.step = lambda batch, between, reference: (batches.append(batch), right(batch, between, reference))[1]
    serve_into(state, 30)
    run_until_idle(made)
    assert [len(batch) for batch in batches] == [8] * (made.memory.num_trained // 8)
    assert max(made.memory.copies.values()) == 1
    assert not any(example.loss_mask_T.all() for batch in batches for example in batch)


def test_a_flood_of_one_client_costs_the_others_little(tmp_path, state):
    """120 requests of one client on a subject of its own beside 40 of others: what the others' acceptance loses is stated
    here."""
    others = [dataclasses.replace(t, client_key=f"{n:016x}") for n, t in enumerate(served_traces(40))]
    flood = [
        dataclasses.replace(t, request_id=f"f{n}", client_key="f" * 16)
        for n, t in enumerate(served_traces(120, first=500))
    ]
    unseen = [example_from_trace(t, 10_000 + n) for n, t in enumerate(served_traces(24, first=200))]
    alphas = {}
    for name, traffic in {"alone": others, "beside the flood": [*flood[:60], *others, *flood[60:]]}.items():
        folder = tmp_path / name
        shutil.copytree(state, folder)
        TraceStore(folder).append(traffic)
        config = LearningConfig(traces_per_chunk=4, learning_rate=3e-3, warmup_steps=0, replay_spacing=0.0)
        made = Worker(state=folder, target=state.parent / "model", route="default", config=config, max_positions=128)
        run_until_idle(made)
        assert made.memory.num_trained >= 36
        alphas[name] = sum(score.alpha for score in made.trainer.score(unseen)) / len(unseen)
    assert alphas["beside the flood"] > alphas["alone"] - 0.03, alphas


def test_a_candidate_that_learnt_one_clients_flood_is_refused(tmp_path, state):
    """It knows the flood's subject alone; what serves knows the others'. The flood is most of the traffic, and most of what has
    come since."""
    others = [dataclasses.replace(t, client_key=f"{n:016x}") for n, t in enumerate(served_traces(60))]
    flood = [
        dataclasses.replace(t, request_id=f"f{n}", client_key="f" * 16)
        for n, t in enumerate(served_traces(240, first=500))
    ]
    learnt = {}
    for name, traffic in {"others": others[:40], "flood": flood[:40]}.items():
        folder = tmp_path / name
        shutil.copytree(state, folder)
        TraceStore(folder).append(traffic)
        made = worker(folder, traces_per_candidate=1000)
        run_until_idle(made)
        learnt[name] = made.trainer.snapshot()
    made = worker(state, traces_per_chunk=1000, traces_per_candidate=1000)
    parent = made._publish(learnt["others"])
    made.registry.serve(parent.id, "default", {})
    made.turn()
    candidate = made.candidate = made._publish(learnt["flood"])
    started = time.monotonic()
    TraceStore(state).append([*others[40:], *flood[40:]])
    while made.candidate is not None:
        assert made.turn()
    print(f"refused within {time.monotonic() - started:.2f} s; it has drafted nothing")
    row = made.registry.version(candidate.id)
    assert row["status"] == "rejected", row
    assert made.registry.in_service("default").id == parent.id


# --- what cannot be used, what waits, what was there before ----------------------------------------------------------


def test_traces_the_draft_cannot_take_are_passed_over_and_counted(state):
    """Too long for it, of another target, or with tokens it does not know: none of them may end the process."""
    good = served_traces(4)
    bad = [
        dataclasses.replace(good[0], request_id="long", prompt_token_ids=[1] * 200),
        dataclasses.replace(good[0], request_id="foreign", target_fingerprint="another"),
        dataclasses.replace(good[0], request_id="unknown", prompt_token_ids=[1, 64]),
        dataclasses.replace(good[0], request_id="negative", prompt_token_ids=[1, -1]),
    ]
    TraceStore(state).append([*bad, *good])
    made = worker(state)
    run_until_idle(made)
    assert made.num_unusable == 4
    assert made.memory.num_trained + len(made.memory.held_out) == 4


def test_training_goes_on_while_new_traces_never_cease(state):
    """Under steady load at least one trace waits at every turn; steps are taken all the same."""
    made = worker(state)
    for number in range(40):
        serve_into(state, 1, first=number)
        made.turn()
    assert made.trainer.num_steps >= 5


def test_a_backlog_is_read_and_scored_in_parts(state, monkeypatch):
    from livedraft.learning import worker as room

    monkeypatch.setattr(room, "MAX_READ_A_TURN", 10)
    monkeypatch.setattr(room, "MAX_SCORED_A_TURN", 4)
    serve_into(state, 30)
    made = worker(state)
    made.turn()
    assert sum(row.alpha is not None for row in TraceStore(state).rows()) == 4
    run_until_idle(made)
    assert all(row.alpha is not None for row in TraceStore(state).rows())


def test_while_requests_come_gentle_scores_a_sample_and_learns_from_all(state, monkeypatch):
    monkeypatch.setitem(pacing.BUSY_PAUSE_SECONDS, "gentle", 0.0)
    serve_into(state, 32)
    made = worker(state, level="gentle")
    made.pacing._yield_flag[0] = 1
    for _ in range(40):
        made.turn()
    rows = TraceStore(state).rows()
    every = pacing.SCORED_WHILE_BUSY["gentle"]
    assert {row.id for row in rows if row.alpha is not None} == {row.id for row in rows if row.id % every == 0}
    num_train = sum(not row.is_held_out for row in rows)
    assert made.memory.num_trained == num_train // 4 * 4
    # Where the traffic may have changed the next ones are all looked at.
    with monkeypatch.context() as patched:
        patched.setattr(DriftWatch, "is_suspicious", True)
        serve_into(state, 4, first=32)
        made.turn()
    assert all(row.alpha is not None for row in TraceStore(state).rows() if row.id > 32)
    made.checkpoint()
    # Those that trained unscored are not scored after a restart: that would be no test any more.
    again = worker(state, level="gentle")
    again.pacing._yield_flag[0] = 0
    run_until_idle(again)
    trained = {n for n in made.memory.trained_ids if n <= 32}
    assert {row.id for row in TraceStore(state).rows() if row.alpha is None} == {n for n in trained if n % every}


def test_while_requests_come_the_gate_asks_about_a_few(state, monkeypatch):
    monkeypatch.setitem(pacing.BUSY_PAUSE_SECONDS, "gentle", 0.0)
    monkeypatch.setitem(pacing.EVIDENCE_WHILE_BUSY, "gentle", 10)
    monkeypatch.setattr(gate, "MIN_POSITIONS", 100)
    made = worker(state, level="gentle")
    serve_into(state, 30)
    run_until_idle(made)
    assert made.candidate is not None
    serve_into(state, 40, first=30)
    asked, scores = [], made._scores
    made._scores = lambda version, examples: asked.append(len(examples)) or scores(version, examples)
    made.pacing._yield_flag[0] = 1
    while made.candidate is not None:
        assert made.turn()
    assert max(asked) == 10


def test_what_idle_compute_learnt_by_replay_alone_is_offered_too(state, monkeypatch):
    """The traffic has ended: without new requests no candidate would ever be due."""
    monkeypatch.setattr(gate, "MIN_POSITIONS", 100)
    made = worker(state, traces_per_candidate=20, max_passes=1)
    serve_into(state, 60)
    run_until_idle(made)
    serve_into(state, 19, first=60)  # evidence for the one that waits, too few for the next
    run_until_idle(made)
    assert (made.candidate, made.canary) == (None, None)
    made.checkpoint()
    again = worker(state, traces_per_candidate=20, max_passes=3)  # now there is something to go over
    run_until_idle(again)
    assert again.trainer.num_steps > made.trainer.num_steps
    assert again.memory.num_trained == made.memory.num_trained
    assert again.num_candidates == made.num_candidates + 1
    run_until_idle(again)
    assert again.num_candidates == made.num_candidates + 1  # once: nothing is left to go over


def test_a_restart_scores_nothing_twice(state):
    made = worker(state)
    serve_into(state, 14)
    run_until_idle(made)
    made.checkpoint()
    before = [(row.alpha, row.is_held_out) for row in TraceStore(state).rows()]
    again = worker(state)
    again.trainer.score = lambda *arguments, **options: pytest.fail("scored again")
    again._read_new_traces()
    assert not again._score_new()
    assert set(again.memory.held_out) == set(made.memory.held_out)
    assert not set(again.memory.examples) & set(again.memory.held_out)
    assert [(row.alpha, row.is_held_out) for row in TraceStore(state).rows()] == before
    assert again.num_tests_since_promotion == made.num_tests_since_promotion


def test_candidates_of_a_process_that_ended_are_rejected(state):
    made = worker(state)
    serve_into(state, 12)
    run_until_idle(made)
    made.candidate = None
    made._freeze_candidate()
    candidate = made.candidate.id
    worker(state)
    assert Registry(state).version(candidate)["status"] == "rejected"
    assert not Registry(state).folder(candidate).exists()


def test_serving_is_told_now_and_then_what_the_draft_in_service_is_worth(state, monkeypatch):
    monkeypatch.setattr(worker_room, "REQUESTS_BETWEEN_PRIORS", 8)
    made = worker(state)

    def score(count, first=0):
        serve_into(state, count, first)
        made._read_new_traces()
        while made._score_new():
            pass

    score(6)

    def noted():
        return (made.registry.version(made.in_service.id)["decision"] or {}).get("recent_alpha")

    assert noted() is None
    score(4, first=6)
    alphas = [row.alpha for row in made.store.rows()]
    assert noted() == pytest.approx(sum(alphas) / len(alphas), abs=1e-3)
