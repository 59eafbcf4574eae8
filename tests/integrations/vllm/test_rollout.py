"""Canary, watch and roll-back over replicas that are only counters; the registry is a real one."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import draft_from_target, save_draft
from livedraft.engine.watch import LiveCounts
from livedraft.events import Events
from livedraft.integrations.vllm.drafts import ExportedVersion
from livedraft.integrations.vllm.replica import RefusedError
from livedraft.integrations.vllm.rollout import Rollout
from livedraft.records import DraftVersion
from tests.tiny import random_model

ROUTE = "default"
GOOD, BAD = 0.6, 0.1
DRAFT = draft_from_target(random_model(), num_layers=1, token_ids=list(range(8)))


@dataclass(eq=False)
class FakeMember:
    name: str
    version: str
    can_swap: bool = True
    phase: str = "ready"
    num_running: int = 0
    totals: tuple[int, int] = (0, 0)  # rounds, accepted, of the draft it has
    life: tuple[int, int] = (1, 0)

    def counts(self) -> LiveCounts:
        rounds, accepted = self.totals
        return LiveCounts(
            num_requests=rounds // 10, num_rounds=rounds, num_accepted=accepted, num_drafted_tokens=3 * rounds
        )

    def serve(self, rounds: int, rate: float) -> None:
        self.totals = (self.totals[0] + rounds, self.totals[1] + int(rounds * rate))


class FakeFleet:
    def __init__(self, members: list[FakeMember]) -> None:
        self.members = members
        self.refused: set[str] = set()
        self.lost: set[str] = set()

    def ready(self) -> list[FakeMember]:
        return [member for member in self.members if member.phase == "ready"]

    def give(self, member: FakeMember, version: ExportedVersion) -> None:
        if version.version in self.refused:
            raise RefusedError("norm has shape [1]")
        if member.name in self.lost:
            member.phase = "down"
            return
        member.version, member.totals = version.version, (0, 0)


class Stage:
    def __init__(self, state: Path, num_members: int) -> None:
        self.registry = Registry(state)
        self.first = self.publish("v0000-first", "in_service", parent=None)
        self.members = [FakeMember(f"replica {n}", self.first.id) for n in range(num_members)]
        self.fleet = FakeFleet(self.members)
        self.events: list[dict] = []
        events = Events()
        events.subscribe(self.events.append)
        self.rollout = Rollout(
            self.fleet, self.registry, route=ROUTE, events=events,
            export=lambda id: ExportedVersion(version=id, folder=state / id, sha256="x"),
        )  # fmt: skip

    def publish(self, id: str, status: str, parent: str | None = "v0000-first") -> DraftVersion:
        version = DraftVersion(
            id=id, route=ROUTE, parent=parent, sha256="", target_fingerprint="t", tokenizer_fingerprint="k",
            num_layers=1, vocabulary_size=8, created_at=0.0, num_requests_seen=3,
        )  # fmt: skip
        return self.registry.publish(lambda path: save_draft(DRAFT, path), version, status=status)

    def canary(self, id: str) -> DraftVersion:
        version = self.publish(id, "candidate")
        self.registry.start_canary(id, {"parent_alpha": GOOD, "alpha": GOOD})
        return version

    def versions(self) -> list[str]:
        return [member.version for member in self.members]

    def status(self, id: str) -> str:
        return self.registry.version(id)["status"]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


@pytest.fixture
def make(tmp_path):
    return lambda num_members: Stage(tmp_path, num_members)


def test_one_replica_takes_a_version_at_once_and_keeps_it_when_it_does_well(make):
    stage = make(1)
    stage.members[0].serve(400, GOOD)
    new = stage.canary("v1")
    stage.rollout.look()
    assert stage.versions() == [new.id] and stage.status(new.id) == "in_service"
    assert stage.rollout.trial.stage == "watched"
    stage.members[0].serve(700, GOOD + 0.1)
    stage.rollout.look()
    assert stage.rollout.trial is None and "watch_ended" in stage.names()


def test_one_replica_goes_back_when_the_new_version_is_worse(make):
    stage = make(1)
    stage.members[0].serve(4000, GOOD)
    new = stage.canary("v1")
    stage.rollout.look()
    stage.members[0].serve(2000, BAD)
    stage.rollout.look()
    assert stage.versions() == [stage.first.id]
    assert stage.status(new.id) == "rolled_back" and stage.status(stage.first.id) == "in_service"
    assert "draft_rolled_back" in stage.names()


def test_a_canary_stays_at_one_of_three_until_it_has_shown_itself(make):
    stage = make(3)
    new = stage.canary("v1")
    stage.rollout.look()
    assert stage.versions() == [new.id, stage.first.id, stage.first.id]
    stage.rollout.look()
    assert stage.status(new.id) == "canary"  # no evidence yet
    for member in stage.members:
        member.serve(500, GOOD)
    stage.rollout.look()
    assert stage.versions() == [new.id] * 3 and stage.status(new.id) == "in_service"
    assert "canary_confirmed" in stage.names()


def test_a_bad_canary_never_reaches_the_others(make):
    stage = make(3)
    new = stage.canary("v1")
    stage.rollout.look()
    stage.members[0].serve(1000, BAD)
    for member in stage.members[1:]:
        member.serve(1000, GOOD)
    stage.rollout.look()
    assert stage.versions() == [stage.first.id] * 3
    assert stage.status(new.id) == "rolled_back" and stage.rollout.trial is None


def test_what_the_others_did_before_the_trial_is_no_evidence(make):
    """They served other traffic then: a canary is compared over the same time."""
    stage = make(2)
    stage.members[1].serve(5000, 0.9)
    stage.canary("v1")
    stage.rollout.look()
    stage.members[0].serve(1000, GOOD)
    stage.members[1].serve(1000, GOOD)
    stage.rollout.look()
    assert stage.status("v1") == "in_service"


def test_one_of_the_others_that_restarts_meanwhile_counts_from_there(make):
    stage = make(2)
    stage.members[1].serve(5000, 0.9)
    stage.canary("v1")
    stage.rollout.look()
    stage.members[1].totals, stage.members[1].life = (0, 0), (2, 0)
    stage.members[0].serve(1000, GOOD)
    stage.members[1].serve(1000, GOOD)
    stage.rollout.look()
    assert stage.status("v1") == "in_service"
    assert stage.registry.version("v1")["decision"]["parent_live_rounds"] == 1000


def test_weights_that_a_replica_refuses_are_set_aside_and_serving_goes_on(make):
    stage = make(2)
    stage.fleet.refused.add("v1")
    stage.canary("v1")
    stage.rollout.look()
    assert stage.versions() == [stage.first.id] * 2
    assert stage.status("v1") == "set_aside" and "draft_refused" in stage.names()
    stage.rollout.look()


def test_a_replica_lost_in_its_swap_gets_the_version_when_it_is_back(make):
    stage = make(2)
    stage.fleet.lost.add("replica 0")
    new = stage.canary("v1")
    stage.rollout.look()
    assert stage.rollout.trial is None and stage.status(new.id) == "canary"
    stage.rollout.look()  # the other one is tried; with one left there is none to compare with
    assert stage.versions() == [stage.first.id, new.id]
    stage.fleet.lost.clear()
    stage.members[0].phase = "ready"
    stage.rollout.look()
    assert stage.versions() == [new.id] * 2


def test_an_operators_choice_goes_to_all_and_is_watched(make):
    stage = make(2)
    for member in stage.members:
        member.serve(500, GOOD)
    stage.publish("v1", "imported")
    stage.registry.serve("v1", ROUTE, {})
    stage.rollout.look()
    assert stage.versions() == ["v1", "v1"] and stage.rollout.trial.stage == "watched"
    stage.members[0].serve(2000, BAD)
    stage.members[1].serve(2000, BAD)
    stage.rollout.look()
    assert stage.versions() == [stage.first.id] * 2


def test_an_operators_roll_back_is_not_questioned(make):
    stage = make(1)
    stage.members[0].serve(400, GOOD)
    stage.canary("v1")
    stage.rollout.look()
    stage.registry.roll_back(ROUTE, {"rolled_back_by": "me"})
    stage.rollout.look()
    assert stage.versions() == [stage.first.id] and stage.rollout.trial is None


def test_a_canary_withdrawn_by_an_operator_leaves_its_replica(make):
    stage = make(2)
    stage.canary("v1")
    stage.rollout.look()
    stage.registry.withdraw("v1", {})
    stage.rollout.look()
    assert stage.versions() == [stage.first.id] * 2 and stage.rollout.trial is None


def test_a_canary_replica_that_restarts_meanwhile_is_given_the_canary_again(make):
    stage = make(2)
    new = stage.canary("v1")
    stage.rollout.look()
    stage.members[0].version = stage.first.id  # restarted with what is in service
    stage.rollout.look()
    assert stage.versions() == [new.id, stage.first.id]


def test_without_a_draft_in_vllm_a_version_waits_for_the_next_start(make):
    stage = make(1)
    stage.members[0].can_swap = False
    stage.canary("v1")
    stage.rollout.look()
    assert stage.status("v1") == "in_service" and stage.versions() == [stage.first.id]
    assert "draft_waits_for_restart" in stage.names()
