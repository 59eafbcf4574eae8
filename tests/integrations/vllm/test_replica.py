"""The protocol of a swap and of a start, against a vLLM that only answers."""

import json
from pathlib import Path

import httpx
import pytest

from livedraft.integrations.vllm.drafts import ExportedVersion
from livedraft.integrations.vllm.replica import DeadEngineError, RefusedError, Replica, ReplicaError, counts_of
from livedraft.integrations.vllm.wire import PROTOCOL
from livedraft.records import UserError

VERSION = ExportedVersion(version="v1", folder=Path("/drafts/v1"), sha256="abc")
PROBE = {
    "protocol": PROTOCOL, "vllm": "0.32.0", "runner": "CPUModelRunner", "device": "cpu", "rank": 0, "method": "draft_model",
    "num_speculative_tokens": 3, "has_draft": True, "sampling": "fine", "problems": [],
}  # fmt: skip


class Vllm:
    """Answers by RPC name; two ranks. What it was asked for, in order, is in `asked`."""

    def __init__(self, **answers) -> None:
        self.answers = {
            "livedraft_probe": [PROBE, PROBE],
            "livedraft_stage": [{"problem": ""}] * 2,
            "livedraft_staged": [{"version": "v1", "problem": ""}] * 2,
            "livedraft_swap": [{"version": "v1", "sha256": "abc", "seconds": 0.1}] * 2,
            **answers,
        }
        self.asked: list[str] = []
        self.replica = Replica("http://vllm", http=httpx.Client(transport=httpx.MockTransport(self._answer)))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/collective_rpc":
            self.asked.append(str(request.url).removeprefix("http://vllm"))
            answer = self.answers.get(request.url.path, {})
            return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)
        method = json.loads(request.content)["method"]
        self.asked.append(method)
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json={"results": answer})

    def swap(self):
        return self.replica.swap(VERSION, source="/drafts/v1/model.safetensors", token="t")


def test_all_that_can_be_refused_comes_before_the_pause_and_prefixes_are_forgotten_before_it_ends():
    vllm = Vllm()
    report = vllm.swap()
    assert vllm.asked == [
        "livedraft_stage", "livedraft_staged", "/pause?mode=keep", "livedraft_swap",
        "/reset_prefix_cache?reset_running_requests=true", "/resume",
    ]  # fmt: skip
    assert report["version"] == "v1" and report["paused_seconds"] >= 0


@pytest.mark.parametrize("call", ["livedraft_stage", "livedraft_staged"])
def test_a_file_that_one_rank_refuses_is_never_loaded(call):
    vllm = Vllm(**{call: [{"version": "v1", "problem": ""}, {"version": "", "problem": "norm has shape [3]"}]})
    with pytest.raises(RefusedError, match=r"norm has shape \[3\]"):
        vllm.swap()
    assert not any("pause" in one for one in vllm.asked)


def test_a_refusal_by_all_resumes_and_by_some_is_the_end():
    vllm = Vllm(livedraft_swap=[{"refused": "not staged"}] * 2)
    with pytest.raises(RefusedError, match="not staged"):
        vllm.swap()
    assert vllm.asked[-1] == "/resume"
    with pytest.raises(DeadEngineError, match="not staged"):
        Vllm(livedraft_swap=[{"refused": "not staged"}, {"version": "v1", "sha256": "abc"}]).swap()


@pytest.mark.parametrize(
    "answers",
    [
        {"livedraft_swap": [{"version": "v1", "sha256": "abc"}, {"failed": "norm is not what was sent."}]},
        {"livedraft_swap": [{"version": "v1", "sha256": "abc"}, {"version": "v1", "sha256": "other"}]},
        {"livedraft_swap": httpx.Response(500, text="EngineDeadError")},
        {"livedraft_swap": httpx.ReadTimeout("too long")},
        {"/resume": httpx.Response(500)},
    ],
)
def test_whatever_goes_wrong_after_the_pause_makes_the_engine_count_as_dead(answers):
    with pytest.raises(DeadEngineError):
        Vllm(**answers).swap()


def test_the_probe_says_what_is_there():
    found = Vllm().replica.probe()
    assert (found.version, found.has_draft, found.sampling) == ("0.32.0", True, "fine")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([{**PROBE, "protocol": 0}], "speaks protocol 0"),
        ([{**PROBE, "vllm": "0.30.0"}], "not supported"),
        ([PROBE, {**PROBE, "problems": ["Its batch has no req_ids."]}], "Its batch has no req_ids"),
        (httpx.Response(500, text="no attribute livedraft_probe"), "without livedraft's extension"),
    ],
)
def test_what_is_not_as_agreed_is_refused_with_the_reason(answer, words):
    with pytest.raises(UserError, match=words):
        Vllm(livedraft_probe=answer).replica.probe()


def test_a_server_without_development_routes_is_told_so():
    with pytest.raises(ReplicaError, match="VLLM_SERVER_DEV_MODE=1"):
        Vllm(livedraft_probe=httpx.Response(404)).replica.probe()


def test_counts_are_read_from_vllms_public_metrics():
    text = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 5.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="stop"} 2.0
vllm:request_success_total{finished_reason="length"} 1.0
"""
    counts = counts_of(text)
    assert (counts.num_rounds, counts.num_accepted, counts.num_drafted_tokens, counts.num_requests) == (15, 7, 30, 3)
    assert counts_of("").num_rounds == 0
