"""`/admin` over a real state folder: its key, what it shows, what it does. The scripted backend serves."""

import dataclasses

import pytest

from livedraft.config import ServerConfig
from livedraft.drafts.database import read_controls, record_events, write_status
from livedraft.drafts.registry import ROUTING_STATUS, Registry, new_version_id
from livedraft.drafts.weights import save_draft
from livedraft.learning.capture import conversation_key, load_secret
from livedraft.learning.store import TraceStore
from livedraft.records import DraftVersion
from tests.learning.toy import one_layer_draft, served_traces
from tests.server.scripted import scripted
from tests.serving import InProcess

KEY = {"Authorization": "Bearer boss"}


def publish(state, draft, number, status, parent=None, route="default"):
    version = DraftVersion(
        id=new_version_id(number), route=route, parent=parent, sha256="", target_fingerprint="t",
        tokenizer_fingerprint="t", num_layers=1, vocabulary_size=draft.vocabulary_size, created_at=float(number),
        num_requests_seen=10 * number,
    )  # fmt: skip
    return Registry(state).publish(lambda path: save_draft(draft, path), version, status=status)


@pytest.fixture
def state(tmp_path):
    secret = load_secret(tmp_path)
    traces = [
        dataclasses.replace(trace, client_key=conversation_key(["ann" if n < 2 else "bob"], secret))
        for n, trace in enumerate(served_traces(5))
    ]
    TraceStore(tmp_path).append(traces)
    return tmp_path


@pytest.fixture
def drafts(state):
    smaller = one_layer_draft(60)
    smaller.tensors["final_norm"] += 0.5
    first = publish(state, one_layer_draft(), 0, "in_service")
    return first, publish(state, smaller, 1, "candidate", parent=first.id)


@pytest.fixture
def client(state):
    served = dataclasses.replace(scripted("x"), state=state)
    with InProcess(served, ServerConfig(api_keys=("user",), admin_key="boss")) as made:
        yield made


def test_the_admin_key_and_only_it_opens_admin(client, drafts):
    for headers in ({}, {"Authorization": "Bearer user"}, {"Authorization": "boss"}):
        reply = client.get("/admin/drafts", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_admin_key"
    assert client.get("/admin/drafts", headers=KEY).status_code == 200
    assert client.get("/v1/models", headers=KEY).status_code == 401  # nor is it a user's key
    with InProcess(scripted("x")) as closed:
        reply = closed.get("/admin/drafts", headers=KEY)
        assert reply.status_code == 403
        assert "--admin-key" in reply.json()["error"]["message"]


def test_without_a_state_folder_it_says_so():
    with InProcess(scripted("x"), ServerConfig(admin_key="boss")) as client:
        reply = client.get("/admin/learn", headers=KEY)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "no_state")


def test_drafts_are_listed_shown_compared_promoted_and_rolled_back(client, state, drafts):
    first, second = drafts
    rows = client.get("/admin/drafts", headers=KEY).json()["drafts"]
    assert [(row["id"], row["status"]) for row in rows] == [(first.id, "in_service"), (second.id, "candidate")]
    shown = client.get(f"/admin/drafts/{second.id}", headers=KEY).json()
    assert shown["manifest"]["parent"] == first.id
    diff = client.get(f"/admin/drafts/{first.id}/diff/{second.id}", headers=KEY).json()
    assert (diff["tokens_added"], diff["tokens_removed"], diff["requests_between"]) == (0, 4, 10)
    assert diff["relative_change"]["final_norm"] > 0.1
    assert diff["relative_change"]["head"] == 0
    assert first.id in client.post(f"/admin/drafts/{first.id}/promote", headers=KEY).json()["message"]
    assert client.post(f"/admin/drafts/{second.id}/promote", headers=KEY).status_code == 200
    assert Registry(state).in_service("default").id == second.id
    assert client.post("/admin/rollback", headers=KEY).status_code == 200
    assert Registry(state).in_service("default").id == first.id
    assert client.post("/admin/rollback", headers=KEY).status_code == 409
    for path in ("/admin/drafts/v9", f"/admin/drafts/{first.id}/diff/v9"):
        assert client.get(path, headers=KEY).status_code == 404
    sentences = [event["sentence"] for event in client.get("/admin/events", headers=KEY).json()["events"]]
    assert sentences[-1] == f"the admin API took draft {second.id} out of service."


def test_routes_are_listed_rolled_back_and_closed(client, state, drafts):
    first = drafts[0]
    version = dataclasses.replace(first, id=f"{first.id}-shop", route="shop")
    Registry(state).publish(lambda path: save_draft(one_layer_draft(), path), version, status="in_service")
    traces = [dataclasses.replace(trace, route=r) for r, trace in zip(("shop", "tools"), served_traces(2, first=9))]
    TraceStore(state).append(traces)
    write_status(state, ROUTING_STATUS, {"assignments": {"tools": "shop", "lost": "gone"}})
    rows = client.get("/admin/routes", headers=KEY).json()["routes"]
    assert {row["route"]: (row["served_by"], row["version"], row["traces"]) for row in rows} == {
        "default": ("default", first.id, 5), "shop": ("shop", version.id, 1), "tools": ("shop", version.id, 1),
    }  # fmt: skip
    assert list(client.get("/admin/learn", headers=KEY).json()["routes"]) == ["shop"]
    assert client.post("/admin/rollback?route=shop", headers=KEY).status_code == 409
    assert client.post("/admin/routes/shop/close", headers=KEY).status_code == 200
    assert Registry(state).routes() == ["default"]
    for route in ("shop", "default", "nowhere"):
        assert client.post(f"/admin/routes/{route}/close", headers=KEY).status_code == 409
    assert {row["served_by"] for row in client.get("/admin/routes", headers=KEY).json()["routes"]} == {"default"}
    assert client.post(f"/admin/drafts/{version.id}/promote", headers=KEY).status_code == 200
    assert Registry(state).routes() == ["default", "shop"]


def test_a_rollback_takes_the_canary_first(client, state, drafts):
    first, second = drafts
    Registry(state).start_canary(second.id, {"alpha": 0.4})
    assert client.get("/admin/learn", headers=KEY).json()["canary"] == second.id
    assert "withdrawn" in client.post("/admin/rollback", headers=KEY).json()["message"]
    assert Registry(state).version(second.id)["status"] == "rolled_back"
    assert Registry(state).in_service("default").id == first.id


def test_learning_is_paused_resumed_and_asked_for_a_candidate(client, state, drafts):
    for verb, name, value in (("pause", "paused", 1), ("resume", "paused", 0), ("now", "now", 1)):
        assert client.post(f"/admin/learn/{verb}", headers=KEY).status_code == 200
        assert read_controls(state)[name] == value
    status = client.get("/admin/learn", headers=KEY).json()
    assert (status["traces"], status["paused"]) == (5, False)


def test_traces_are_listed_without_text_and_deleted_by_user(client, state):
    listed = client.get("/admin/traces?limit=2", headers=KEY).json()
    assert (listed["total"], len(listed["traces"])) == (5, 2)
    assert not any("prompt" in key or "text" in key for key in listed["traces"][0])
    reply = client.run(client.http.delete("/admin/traces?user=ann", headers=KEY))
    assert reply.json()["message"].startswith("2 traces")
    assert len(TraceStore(state).rows()) == 3
    assert read_controls(state)["forget"] == 1
    assert client.run(client.http.delete("/admin/traces", headers=KEY)).status_code == 400  # whose?


def test_every_event_has_a_sentence(client, state):
    record_events(
        state, [{"event": "drift", "time": 1.0, "alpha": 0.2, "before": 0.5}, {"event": "odd", "time": 2.0, "x": 1}]
    )
    events = client.get("/admin/events?limit=2", headers=KEY).json()["events"]
    assert events[0]["sentence"].startswith("The traffic changed: acceptance fell from 0.50 to 0.20")
    assert events[1]["sentence"] == "Odd: x 1."
    after = client.get(f"/admin/events?after_id={events[0]['id']}", headers=KEY).json()["events"]
    assert [event["event"] for event in after] == ["odd"]


def test_an_admin_key_is_never_a_users_key():
    with pytest.raises(ValueError, match="admin_key"):
        ServerConfig(api_keys=("a",), admin_key="a")
    with pytest.raises(ValueError, match="admin_key"):
        ServerConfig(admin_key="")
