"""Canary, watch and roll-back with a real registry and a real engine; the watcher's looks are made by hand."""

import dataclasses

import pytest
import torch

from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import DraftWeights, draft_from_target, save_draft
from livedraft.engine import swap
from livedraft.engine.swap import SwapWatcher
from livedraft.events import Events
from livedraft.records import DraftVersion, UserError
from tests.tiny import decoder, draft_model, engine, perturbed_draft, random_model, request, serve

MODEL = random_model()
GOOD = perturbed_draft(MODEL, noise=0.0)
FAIR = perturbed_draft(MODEL, noise=0.05)
NOISE = perturbed_draft(MODEL, noise=5.0)


class Stage:
    """A registry, an engine that serves its version, and a watcher that looks when told to."""

    def __init__(self, tmp_path, in_service):
        self.registry = Registry(tmp_path)
        self.events, self.seen = Events(), []
        self.events.subscribe(self.seen.append)
        self.target = decoder(MODEL)
        self.first = self.publish(in_service, status="in_service")
        self.served = engine(self.target, self.build(self.first), k=2, events=self.events)
        self.watcher = SwapWatcher(self.served, self.registry, build=self.build, events=self.events)
        self.num_served = 0

    def publish(self, weights, status="candidate", parent=None, **fields):
        defaults = {"target_fingerprint": MODEL.fingerprint, "num_layers": weights.num_layers}
        version = DraftVersion(
            id=new_version_id(len(self.registry.versions())), route="default", parent=parent, sha256="",
            tokenizer_fingerprint="t", vocabulary_size=weights.vocabulary_size, created_at=0.0, **{**defaults, **fields},
        )  # fmt: skip
        return self.registry.publish(lambda path: save_draft(weights, path), version, status=status)

    def build(self, version):
        if version.target_fingerprint != MODEL.fingerprint:
            raise UserError("another target")
        return draft_model(self.registry.load(version), self.target, version=version.id)

    def pass_gate(self, weights, **numbers):
        version = self.publish(weights, parent=self.registry.in_service("default").id)
        self.registry.start_canary(version.id, {"alpha": 0.9, "parent_alpha": 0.9, **numbers})
        return version

    def serve(self, count, looks=True):
        for _ in range(count):
            prompt = [(7 * self.num_served + 3 * i) % 64 for i in range(4)]
            serve(self.served, [request(prompt, self.num_served, max_tokens=40)])
            self.num_served += 1
            if looks:
                self.watcher.look()

    def status(self, version):
        return self.registry.version(version.id)["status"]

    def names(self):
        return [event["event"] for event in self.seen]


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(swap, "POLL_SECONDS", 1e6)
    made = []

    def build(in_service=FAIR):
        made.append(Stage(tmp_path, in_service))
        return made[-1]

    yield build
    for one in made:
        one.watcher.close()


def test_a_good_version_is_a_canary_first_then_watched_then_alone(stage):
    s = stage()
    new = s.pass_gate(GOOD)
    s.serve(1)
    assert s.status(new) == "canary"
    assert s.served.draft_version == s.first.id
    s.serve(12)
    assert s.status(new) == "in_service"
    assert s.status(s.first) == "retired"
    assert s.served.draft_version == new.id
    assert s.served.drafting.second_version == s.first.id
    s.serve(80)
    assert s.served.drafting.second is None
    assert [n for n in s.names() if n != "draft_swapped"] == [
        "trial_started",
        "canary_confirmed",
        "trial_started",
        "watch_ended",
    ]
    decision = s.registry.version(new.id)["decision"]
    assert decision["alpha"] == 0.9
    assert decision["live_rounds"] >= 32


@pytest.mark.parametrize("k", [2, None])
def test_noise_that_passed_the_gate_is_rolled_back_and_the_cost_is_known(stage, k):
    s = stage(GOOD)
    s.served.drafting.service.lengths.fixed = k
    bad = s.pass_gate(NOISE)
    s.serve(60)
    assert s.status(bad) == "rolled_back"
    assert s.status(s.first) == "in_service"
    assert s.served.draft_version == s.first.id
    assert s.served.drafting.second is None
    (event,) = [e for e in s.seen if e["event"] == "draft_rolled_back"]
    # What it cost: tokens drafted in vain on a tenth of the requests, and no answer.
    assert event["live_drafted_tokens"] < 400
    assert event["live_requests"] <= 12
    s.serve(3)
    assert s.served.draft_version == s.first.id


def test_an_operators_choice_is_served_at_once_and_undone_when_it_is_worse(stage):
    s = stage(GOOD)
    bad = s.publish(NOISE, parent=s.first.id)
    s.registry.serve(bad.id, "default", {"promoted_by": "operator"})
    s.watcher.look()
    s.serve(1, looks=False)
    assert s.served.draft_version == bad.id
    s.serve(40)
    assert s.served.draft_version == s.first.id
    assert s.status(bad) == "rolled_back"
    assert s.registry.version(bad.id)["decision"]["promoted_by"] == "operator"


def test_a_roll_back_by_an_operator_is_not_questioned(stage):
    s = stage(GOOD)
    worse = s.publish(FAIR, parent=s.first.id)
    better = s.publish(GOOD, parent=worse.id)
    for version in (worse, better):
        s.registry.serve(version.id, "default", {})
        s.watcher.look()
        s.serve(1)
    s.registry.roll_back("default", {"rolled_back_by": "operator"})
    s.serve(30)
    assert s.served.draft_version == worse.id
    assert s.served.drafting.second is None
    assert s.status(better) == "rolled_back"


def test_where_nothing_pays_there_is_nothing_to_protect(stage):
    s = stage(NOISE)
    s.served.drafting.service.lengths.fixed = None
    s.served.drafting.service.lengths.set_prior(0.0)
    new = s.pass_gate(GOOD)
    s.watcher.look()
    assert s.status(new) == "in_service"
    s.serve(1)
    assert s.served.draft_version == new.id
    assert s.served.drafting.second is None


def test_a_canary_withdrawn_by_an_operator_leaves_at_once(stage):
    s = stage(GOOD)
    new = s.pass_gate(GOOD)
    s.watcher.look()
    s.serve(1, looks=False)
    assert s.served.drafting.second_version == new.id
    s.registry.withdraw(new.id, {"rolled_back_by": "operator"})
    s.serve(3)
    assert s.served.drafting.second is None
    assert s.served.draft_version == s.first.id


def test_the_next_version_does_not_wait_for_the_end_of_the_watch(stage):
    s = stage()
    first = s.pass_gate(GOOD)
    s.serve(15)
    assert s.watcher.trial.stage == "watched"
    second = s.pass_gate(GOOD)
    s.serve(3)
    assert s.watcher.trial.new.id == second.id
    assert s.watcher.trial.old.id == first.id


def nan_weights():
    return DraftWeights(
        tensors={n: torch.full_like(t, torch.nan) if n == "head" else t for n, t in GOOD.tensors.items()},
        draft_to_target_W=GOOD.draft_to_target_W,
    )


def other_vocabulary():
    bigger = random_model(dataclasses.replace(MODEL.config, vocabulary_size=80))
    return draft_from_target(bigger, num_layers=1, token_ids=list(range(80)))


@pytest.mark.parametrize("sabotage", ["nan", "foreign", "damaged", "missing", "fails"])
def test_a_version_that_cannot_serve_is_set_aside_and_service_goes_on(stage, sabotage):
    s = stage(GOOD)
    if sabotage == "nan":
        bad = s.pass_gate(nan_weights())
    elif sabotage == "foreign":
        bad = s.publish(GOOD, target_fingerprint="another")
        s.registry.start_canary(bad.id, {})
    else:
        bad = s.pass_gate(GOOD)
        path = s.registry.weights_path(bad.id)
        if sabotage == "damaged":
            path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
        elif sabotage == "missing":
            path.unlink()
    if sabotage == "fails":
        s.watcher.look()
        s.watcher.trial.new_draft.propose = lambda tasks: 1 / 0
    s.serve(4)
    assert s.status(bad) == ("rolled_back" if sabotage == "fails" else "set_aside")
    assert s.served.draft_version == s.first.id
    assert s.served.drafting.second is None
    reasons = [e for e in s.seen if e["event"] in ("draft_refused", "draft_rolled_back")]
    assert len(reasons) == 1


def test_an_operators_choice_that_cannot_be_read_leaves_the_last_good_one_in_service(stage):
    s = stage(GOOD)
    bad = s.publish(GOOD, parent=s.first.id)
    s.registry.weights_path(bad.id).write_bytes(b"nothing")
    s.registry.serve(bad.id, "default", {"promoted_by": "operator"})
    s.serve(2)
    assert s.registry.in_service("default").id == s.first.id
    assert s.status(bad) == "set_aside"
    assert s.served.draft_version == s.first.id


def test_a_draft_of_another_vocabulary_does_not_fit_the_target():
    from livedraft.drafts.weights import check_against_target

    with pytest.raises(UserError, match="does not fit this target"):
        check_against_target(other_vocabulary(), MODEL.config, "It", 64)


def test_a_watch_goes_on_after_a_restart(stage, tmp_path):
    s = stage(GOOD)
    bad = s.publish(NOISE, parent=s.first.id)
    s.registry.start_canary(bad.id, {"alpha": 0.9, "promote": True})
    s.registry.serve(bad.id, "default", {"replaced": s.first.id})  # confirmed, and then the server was killed
    again = object.__new__(Stage)
    again.__dict__.update(s.__dict__)
    again.served = engine(s.target, s.build(bad), k=2, events=s.events)
    again.watcher = SwapWatcher(again.served, s.registry, build=s.build, events=s.events)
    try:
        again.serve(60)
        assert again.served.draft_version == s.first.id
        assert s.status(bad) == "rolled_back"
    finally:
        again.watcher.close()


def test_a_draft_that_fails_outside_a_trial_gives_way_to_the_one_before(stage):
    s = stage(GOOD)
    second = s.publish(GOOD, parent=s.first.id)
    s.registry.serve(second.id, "default", {})
    s.watcher.look()
    s.serve(1)
    s.watcher.routes["default"]._end_trial()
    s.watcher.routes["default"]._draft.propose = lambda tasks: 1 / 0
    s.serve(5)
    assert s.served.draft_version == s.first.id
    assert s.served.draft is not None
    assert s.status(second) == "rolled_back"


def test_a_fixed_draft_length_is_protected_by_a_canary_too(stage):
    s = stage(NOISE)  # its own acceptance says nothing pays, but the user has fixed k = 2
    s.pass_gate(GOOD)
    s.serve(1)
    assert s.watcher.trial.stage == "canary"


def test_what_the_trainer_measures_of_a_draft_that_is_not_drafted_with_brings_it_back(stage, monkeypatch):
    """The traffic suits it again, and with no length worth it there are hardly any verdicts to see that by."""
    monkeypatch.setattr(swap, "_PRIOR_SECONDS", 0.0)
    s = stage()
    lengths = s.served.drafting.service.lengths
    lengths.set_prior(0.0)
    s.watcher.look()
    s.served.take_up_offered_draft()
    assert lengths.prior == 0.0
    for at in (1.0, 1.0, 2.0):
        s.registry.note(s.first.id, {"recent_alpha": 0.7, "recent_alpha_at": at})
        s.watcher.look()
        s.served.take_up_offered_draft()
        assert lengths.prior == 0.7
        if at == 1.0:
            lengths.record(2, 0)
    assert lengths.acceptance_by_position[0] > 0.5
    lengths.set_prior(0.2)
    s.watcher.look()
    s.served.take_up_offered_draft()
    assert lengths.prior == 0.2  # what was said once is not said again
