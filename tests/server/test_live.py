"""What the dashboard is told, over HTTP and a real state folder; the scripted backend serves."""

import asyncio
import dataclasses
import json
import re

import pytest

from livedraft.config import ServerConfig
from livedraft.drafts.database import record_events, write_status
from livedraft.drafts.registry import Registry
from livedraft.server import live as live_module
from livedraft.server.history import FILE_NAME
from livedraft.server.live import MAX_VIEWERS, Decisions, Latencies, Sampler
from livedraft.speculation.stats import SpeculationStats
from tests.learning.toy import one_layer_draft
from tests.server.scripted import CHAT, scripted
from tests.server.test_admin import publish
from tests.serving import InProcess

NOTHING = {"speculation": [], "generation_tokens": 0, "num_emitted_tokens": 0, "busy_seconds": 0.0}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(live_module, "SAMPLE_SECONDS", 0.01)


def first_events(client, *names):
    """The first event of each name that a new reader is sent."""

    async def read():
        found = {}
        reader = client.server.live.events()
        try:
            async for text in reader:
                lines = text.strip().split("\n")
                if lines[0].startswith("event: "):
                    found.setdefault(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: ")))
                if all(name in found for name in names):
                    return found
        finally:
            await reader.aclose()

    return client.run(asyncio.wait_for(read(), 10))


def rounds(num_drafts, drafted, accepted):
    stats = SpeculationStats()
    for _ in range(num_drafts):
        share = (drafted // num_drafts, accepted // num_drafts)
        stats.record(num_drafted=share[0], num_accepted=share[1], num_emitted=share[1] + 1)
    return stats


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_served_under_a_policy_that_allows_nothing_else():
    with InProcess(scripted("x"), ServerConfig(api_keys=("user",), admin_key="boss")) as client:
        page = client.get("/")
        assert page.status_code == 200
        names = [part.split('"')[0] for part in page.text.replace("src=", "href=").split('href="dashboard/')[1:]]
        assert {"dashboard.js", "uplot.min.js", "dashboard.css", "icon.svg"} <= set(names)
        kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
        imported = ["charts.js", "dom.js", "playground.js", "versions.js", "uplot.LICENSE.txt"]
        for name in [*names, *imported]:
            reply = client.get(f"/dashboard/{name}")
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
            assert reply.headers["x-content-type-options"] == "nosniff"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert client.get("/dashboard", follow_redirects=True).text == page.text
        for path in ("/dashboard/__init__.py", "/dashboard/..%2Flive.py", "/dashboard/nothing.js"):
            assert client.get(path).status_code == 404


def test_the_page_holds_no_script_or_style_of_its_own_and_fetches_nothing_from_elsewhere():
    with InProcess(scripted("x")) as client:
        page = client.get("/").text
        assert page.count("<script") == page.count("<script src=") == 3
        assert "<style" not in page
        assert " style=" not in page
        assert not re.search(r"\son\w+=", page)
        for name in (
            "dashboard.js",
            "charts.js",
            "dom.js",
            "playground.js",
            "versions.js",
            "theme.js",
            "dashboard.css",
        ):
            text = client.get(f"/dashboard/{name}").text
            for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://", "http://"):
                assert word not in text, (name, word)


# --- what it is told --------------------------------------------------------------------------------------------------


def test_without_learning_or_a_state_folder_it_says_what_is_off(quick):
    with InProcess(scripted("x"), ServerConfig(api_keys=("user",))) as client:
        told = first_events(client, "history", "details", "now")
        assert told["history"] == []
        details = told["details"]
        assert (details["model"], details["needs_api_key"], details["has_admin_key"]) == ("script", True, False)
        assert details["keeps_state"] is False
        assert details["learning"] == {"enabled": 0.0}
        assert details["versions"] == details["events"] == details["marks"] == []
        now = told["now"]
        assert (now["phase"], now["recent"], now["drafts"]) == ("ready", None, [])
        assert now["requests"]["time_to_first_token"] is None


def test_versions_decisions_and_training_are_told(quick, tmp_path):
    first = publish(tmp_path, one_layer_draft(), 0, "in_service")
    second = publish(tmp_path, one_layer_draft(), 1, "candidate", parent=first.id)
    Registry(tmp_path).reject(second.id, {"alpha": 0.4, "parent_alpha": 0.5, "reason": "p = 0.9 > 0.05"})
    write_status(tmp_path, "trainer", {"status": "training", "loss": 1.5, "train_seconds": 5.0, "train_flops": 1.0,
                                       "last_problem": "/secret/path"})  # fmt: skip
    write_status(tmp_path, "serving", {"idle_seconds": 50.0, "serve_flops": 4.0})
    record_events(tmp_path, [{"event": "candidate_rejected", "time": 5.0, "version": second.id, "reason": "worse"}])
    served = dataclasses.replace(scripted("x"), state=tmp_path, learning=lambda: {"enabled": 1.0, "trainer_up": 1.0})
    with InProcess(served, ServerConfig(admin_key="boss")) as client:
        details = first_events(client, "details")["details"]
    assert [(row["id"], row["status"], row["can_serve"]) for row in details["versions"]] == [
        (second.id, "rejected", False), (first.id, "in_service", True)
    ]  # fmt: skip
    assert details["versions"][0]["alpha"] == 0.4
    assert [(row["route"], row["reason"]) for row in details["versions"]] == [
        ("default", "p = 0.9 > 0.05"), ("default", None)
    ]  # fmt: skip
    learning = details["learning"]
    assert (learning["status"], learning["loss"], learning["spare_share"], learning["flops_share"]) == (
        "training", 1.5, 0.1, 0.25
    )  # fmt: skip
    assert [mark["kind"] for mark in details["marks"]] == ["rejection"]
    assert details["events"][0]["sentence"] == f"Candidate {second.id} was rejected by the gate: worse."
    assert "secret" not in json.dumps(details)


def test_a_served_request_moves_latencies_and_history_and_the_past_survives_a_restart(quick, tmp_path):
    class Counting:
        tokens = 0

    def served():
        made = dataclasses.replace(scripted("hello world"), state=tmp_path)
        inner = made.backend.snapshot

        def snapshot():
            stats = rounds(Counting.tokens, 4 * Counting.tokens, 2 * Counting.tokens)
            return inner() | {
                "num_emitted_tokens": 3 * Counting.tokens, "busy_seconds": 0.1 * Counting.tokens,
                "estimated_seconds": 1.0 * Counting.tokens, "estimated_plain_seconds": 1.5 * Counting.tokens,
                "speculation": [(("default", "v1"), stats)],
            }  # fmt: skip

        made.backend.snapshot = snapshot
        return made

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.005)

    with InProcess(served()) as client:
        first_events(client, "details")
        client.complete(CHAT | {"stream": True})
        Counting.tokens = 10
        client.run(asyncio.wait_for(until(lambda: client.server.live.history.points), 10))
        now = first_events(client, "now")["now"]
        assert now["recent"]["acceptance_rate"] == 0.5
        assert now["recent"]["mean_acceptance_length"] == 3.0
        assert now["recent"]["tokens_per_second"] == pytest.approx(30.0)
        assert now["recent"]["estimated_speedup"] == pytest.approx(1.5)
        assert now["recent"]["estimated_plain_tokens_per_second"] == pytest.approx(20.0)
        assert 0 < now["requests"]["time_to_first_token"]["p50"] < 10
        assert now["requests"]["inter_token_latency"]["p99"] < 10
    assert (tmp_path / FILE_NAME).exists()
    with InProcess(served()) as again:  # the counters of a new process start anew; the curve does not
        first_events(again, "details")
        told = first_events(again, "history", "now")
        assert len(told["history"]) == 1
        assert told["history"][0]["curves"] == {"default": [10, 40, 20]}
        assert told["now"]["recent"]["acceptance_rate"] == 0.5


def test_nothing_of_a_damaged_history_or_a_failing_backend_ends_the_sampling(quick, tmp_path):
    (tmp_path / FILE_NAME).write_text("no json")
    made = dataclasses.replace(scripted("x"), state=tmp_path)
    calls = []
    inner = made.backend.snapshot

    def snapshot():
        calls.append(1)
        if len(calls) in (2, 3):
            raise RuntimeError("for once")
        return inner()

    made.backend.snapshot = snapshot
    with InProcess(made) as client:

        async def many():
            while len(calls) < 6:
                await asyncio.sleep(0.005)

        client.run(asyncio.wait_for(many(), 10))
        assert first_events(client, "now")["now"]["phase"] == "ready"


def test_reading_needs_no_key_and_changing_does(tmp_path):
    first = publish(tmp_path, one_layer_draft(), 0, "in_service")
    second = publish(tmp_path, one_layer_draft(), 1, "retired", parent=first.id)
    served = dataclasses.replace(scripted("x"), state=tmp_path)
    with InProcess(served, ServerConfig(api_keys=("user",), admin_key="boss")) as client:
        assert client.get("/").status_code == 200
        for path in (f"/admin/drafts/{second.id}/promote", "/admin/rollback"):
            assert client.post(path).status_code == 401
        assert client.post("/v1/chat/completions", CHAT).status_code == 401
        assert Registry(tmp_path).in_service("default").id == first.id


def test_readers_are_counted_refused_past_the_limit_and_gone_when_the_server_drains(quick):
    with InProcess(scripted("x")) as client:
        live = client.server.live

        async def watch():
            async for _ in live.events():
                pass

        async def scene():
            watching = [asyncio.ensure_future(watch()) for _ in range(MAX_VIEWERS)]
            while live.num_viewers < MAX_VIEWERS:
                await asyncio.sleep(0.005)
            refused = await client.http.get("/dashboard/live")
            client.server.drain()
            await asyncio.wait_for(asyncio.gather(*watching), 10)
            return refused

        refused = client.run(scene())
        assert refused.status_code == 503
        assert "32 dashboards are open" in refused.json()["error"]["message"]
        assert live.num_viewers == 0


def test_a_reader_that_missed_a_sample_gets_everything_again(quick):
    with InProcess(scripted("x")) as client:
        live = client.server.live

        async def scene():
            names = []
            reader = live.events()
            while names.count("event: now") < 1:
                names.append((await anext(reader)).split("\n")[0])
            missed = live._tick + 3
            while live._tick < missed:  # a slow reader
                await asyncio.sleep(0.005)
            names.append((await anext(reader)).split("\n")[0])
            await reader.aclose()
            return names

        names = client.run(asyncio.wait_for(scene(), 10))
        assert names[1] == names[-1] == "event: history"


# --- parts --------------------------------------------------------------------------------------------------------------


def test_percentiles_are_of_what_was_seen_lately(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: clock[0])
    latencies = Latencies()
    assert latencies.percentiles() is None
    latencies.add(9.0)
    clock[0] += 301
    for value in range(1, 101):
        latencies.add(value / 100)
    assert latencies.percentiles() == {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def test_a_sample_is_the_difference_of_two_looks_and_none_when_nothing_happened():
    sampler = Sampler(NOTHING | {"speculation": [(("default", "v1"), rounds(2, 8, 4))]})
    assert sampler.point(NOTHING | {"speculation": [(("default", "v1"), rounds(2, 8, 4))]}, None, None) is None
    later = NOTHING | {
        "num_emitted_tokens": 12,
        "speculation": [
            (("default", "v1"), rounds(3, 12, 6)), (("default", "v2"), rounds(1, 4, 4)),
            (("code", "v9"), rounds(1, 2, 0)), (("default", "suffix"), rounds(1, 5, 5)),
        ],
    }  # fmt: skip
    point = sampler.point(later, 0.5, None)
    assert point.num_tokens == 12
    assert point.curves == {"default": [2, 8, 6], "code": [1, 2, 0], "suffix": [1, 5, 5]}
    assert sampler.point(later, 0.5, None) is None
    assert sampler.point(later, 0.5, 1.25).loss == 1.25  # training alone


def test_promotions_rejections_and_roll_backs_are_marked_once_each():
    decisions = Decisions()
    story = [
        ("draft_swapped", {"previous": "v0", "version": "v1"}, "promotion"),
        ("candidate_rejected", {"version": "v2", "reason": "worse"}, "rejection"),
        ("promoted_by_operator", {"version": "v3", "by": "x"}, None),
        ("draft_swapped", {"previous": "v1", "version": "v3"}, "promotion"),
        ("draft_rolled_back", {"version": "v3", "previous": "v1", "watch": "0.1 against 0.4"}, "rollback"),
        ("draft_swapped", {"previous": "v3", "version": "v1"}, None),
        ("trainer_died", {"exit_code": 1, "last_words": "/home/ann/secret"}, None),
        ("request_failed", {"request": "r1", "reason": "secret"}, None),
    ]
    decisions.take({"id": n, "time": float(n), "event": name, **more} for n, (name, more, _) in enumerate(story, 1))
    assert [mark["kind"] for mark in decisions.marks] == [kind for _, _, kind in story if kind]
    told = " ".join(event["sentence"] for event in decisions.sentences)
    assert "worse" in told
    assert "secret" not in told
    assert len(decisions.sentences) == len(story) - 1
