"""The tap on a runner that can be held in the head: what it keeps, when it lets go, that it never waits."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from livedraft.integrations.vllm import tap as tap_module
from livedraft.integrations.vllm.tap import Tap, reduced
from livedraft.records import TEACHER_TOP_K

V = 100
ID = "livedraft-" + "0" * 32


class Runner:
    """As much of vLLM's V1 model runner as the tap knows."""

    def __init__(self) -> None:
        self.requests: dict = {}
        self.use_async_scheduling = False
        self.input_batch = SimpleNamespace(
            req_ids=[], num_tokens_no_spec=np.zeros(8, int), num_prompt_tokens=np.zeros(8, int)
        )
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, bool))
        self.next_tokens: torch.Tensor = torch.empty(0)
        self.draft_probs: torch.Tensor | None = None
        self.rejection_sampler = SimpleNamespace(forward=lambda *arguments: None)

    def _sample(self, logits, spec_decode_metadata):
        self.rejection_sampler.forward(spec_decode_metadata, self.draft_probs, logits, None)
        logits.fill_(float("nan"))  # sampling may write over them
        return SimpleNamespace(sampled_token_ids=self.next_tokens)

    def execute_model(self, scheduler_output, intermediate=None):
        return "executed"

    # --- what a test does ---

    def add(self, id: str, prompt: list[int], **parameters) -> None:
        fields = {"temperature": 0.0, "ignore_eos": False, "stop_token_ids": [], "all_stop_token_ids": {9}}
        sampling = SimpleNamespace(**fields, structured_outputs=parameters.get("structured_outputs"))
        self.requests[id] = SimpleNamespace(prompt_token_ids=prompt, output_token_ids=[], sampling_params=sampling)
        row = len(self.input_batch.req_ids)
        self.input_batch.req_ids.append(id)
        self.input_batch.num_prompt_tokens[row] = self.input_batch.num_tokens_no_spec[row] = len(prompt)

    def round(self, logits: torch.Tensor, tokens: list[list[int]], drafted: list[list[int]] | None = None):
        """`tokens` are each request's new ones, padded with −1."""
        self.next_tokens = torch.tensor(tokens)
        metadata = None
        if drafted is not None:
            flat = torch.tensor([token for some in drafted for token in some])
            metadata = SimpleNamespace(draft_token_ids=flat, num_draft_tokens=[len(some) for some in drafted])
        output = self._sample(logits.clone(), metadata)
        for row, some in enumerate(tokens):
            new = [token for token in some if token >= 0]
            self.input_batch.num_tokens_no_spec[row] += len(new)
            self.requests[self.input_batch.req_ids[row]].output_token_ids += new
        return output

    def finish(self, *ids: str):
        return self.execute_model(SimpleNamespace(finished_req_ids=set(ids)))


@pytest.fixture
def tapping():
    runner, delivered = Runner(), []
    tap = Tap(runner, deliver=delivered.append, version="v1")
    tap.is_on = True
    yield runner, tap, delivered
    tap.close()


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def test_two_requests_of_different_lengths_keep_their_own_rows(tapping):
    runner, tap, delivered = tapping
    runner.add(ID, [1, 2, 3])
    first, second = logits(1), logits(4, seed=1)
    runner.round(first, [[5]])
    runner.add(ID[:-1] + "1", [7])
    # Two drafted tokens for the first (one accepted), none for the second, which has just been read.
    runner.draft_probs = torch.full((2, V), 0.5)
    runner.round(second, [[6, 8, -1], [4, -1, -1]], [[6, 7], []])
    runner.finish(ID)
    tap.close()
    (one,) = delivered
    assert one.prompt_token_ids.tolist() == [1, 2, 3] and one.output_token_ids_T.tolist() == [5, 6, 8]
    expected = torch.log_softmax(torch.cat([first, second[:2]]), -1).topk(TEACHER_TOP_K)
    assert torch.equal(one.teacher_token_ids_TK, expected.indices.int())
    torch.testing.assert_close(one.teacher_log_probs_TK.float(), expected.values, atol=5e-3, rtol=0)
    torch.testing.assert_close(one.tail_mass_T, 1 - expected.values.exp().sum(-1), atol=1e-5, rtol=0)
    assert one.drafted_position_P.tolist() == [1, 2] and one.drafted_token_id_P.tolist() == [6, 7]
    assert one.drafted_accepted_P.tolist() == [True, False] and one.drafted_off_path_P.tolist() == [False, False]
    target = torch.log_softmax(second[:2], -1)[[0, 1], [6, 7]]
    torch.testing.assert_close(one.drafted_target_log_prob_P, target)
    torch.testing.assert_close(one.drafted_log_prob_P, torch.full((2,), 0.5).log())
    assert one.version_T == ["none", "v1", "v1"] and one.draft_version == "v1"
    assert one.sampling["stop_token_ids"] == [9]


def test_private_strange_and_grammar_requests_are_not_looked_at(tapping):
    runner, tap, delivered = tapping
    ids = ("livedraftprivate-" + "0" * 32, "somebody-else")
    for id in ids:
        runner.add(id, [1])
    runner.add(ID, [1], structured_outputs=object())
    runner.round(logits(3), [[5], [5], [5]])
    runner.finish(*ids, ID)
    tap.close()
    assert delivered == [] and tap.num_rounds == 0


def test_a_request_that_began_before_the_tap_is_left_out(tapping):
    runner, tap, delivered = tapping
    tap.is_on = False
    runner.add(ID, [1])
    runner.round(logits(1), [[5]])
    tap.is_on = True
    runner.round(logits(1), [[6]])
    runner.finish(ID)
    tap.close()
    assert delivered == []


def test_parts_of_a_prompt_that_sample_nothing_are_skipped(tapping):
    runner, tap, delivered = tapping
    runner.add(ID, [1, 2])
    runner.discard_request_mask.np[0] = True
    runner._sample(logits(1), None)
    runner.discard_request_mask.np[0] = False
    runner.round(logits(1), [[5]])
    runner.finish(ID)
    tap.close()
    assert delivered[0].output_token_ids_T.tolist() == [5]


def test_a_full_queue_costs_whole_requests_and_never_time(tapping, monkeypatch):
    runner, tap, delivered = tapping
    gate, started = threading.Event(), threading.Event()

    def slow(*arguments):
        started.set()
        gate.wait(5)
        return reduced(*arguments)

    monkeypatch.setattr(tap_module, "reduced", slow)
    runner.add(ID, [1])
    runner.round(logits(1), [[5]])
    assert started.wait(5)
    for _ in range(tap_module.MAX_QUEUED_ROUNDS + 3):
        runner.round(logits(1), [[5]])
    gate.set()
    assert tap.num_dropped_requests == 1 and tap.num_dropped_rounds >= 1
    while not tap._queue.empty():
        pass
    runner.finish(ID)
    runner.input_batch.req_ids.clear()
    runner.add(ID[:-1] + "1", [1])
    runner.round(logits(1), [[6]])
    runner.finish(ID[:-1] + "1")
    tap.close()
    assert [one.id for one in delivered] == [ID[:-1] + "1"]  # the next one is whole


def test_a_token_taken_back_drops_the_request(tapping):
    runner, tap, delivered = tapping
    runner.add(ID, [1])
    runner.round(logits(1), [[5]])
    runner.input_batch.num_tokens_no_spec[0] += 2
    runner.round(logits(1), [[5]])
    runner.finish(ID)
    tap.close()
    assert delivered == [] and tap.num_dropped_requests == 1


def test_a_share_of_the_requests_is_recorded_whole():
    runner, delivered = Runner(), []
    tap = Tap(runner, deliver=delivered.append, version="v1", share=0.5)
    tap.is_on = True
    runner.input_batch.num_prompt_tokens = np.ones(200, int)
    runner.input_batch.num_tokens_no_spec = np.ones(200, int)
    runner.discard_request_mask.np = np.zeros(200, bool)
    ids = [f"livedraft-{n:032x}" for n in range(200)]
    for id in ids:
        runner.add(id, [1])
    for _ in range(2):
        runner.round(logits(200), [[5]] * 200)
    runner.finish(*ids)
    tap.close()
    assert 70 < len(delivered) < 130
    assert all(one.output_token_ids_T.tolist() == [5, 5] for one in delivered)


@pytest.mark.parametrize("missing", ["discard_request_mask", "requests"])
def test_a_tap_that_fails_is_off_and_serving_goes_on(tapping, missing):
    runner, tap, _ = tapping
    runner.add(ID, [1])
    setattr(runner, missing, None)
    assert runner._sample(logits(1), None).sampled_token_ids is runner.next_tokens
    assert not tap.is_on and tap.problem.startswith("The tap failed and is off: ")


def test_closing_leaves_the_runner_as_it_was():
    runner = Runner()
    sample, execute, verify = runner._sample, runner.execute_model, runner.rejection_sampler.forward
    tap = Tap(runner, deliver=lambda one: None, version="v1")
    assert runner.execute_model(SimpleNamespace(finished_req_ids=set()), None) == "executed"
    tap.close()
    assert (runner._sample, runner.execute_model, runner.rejection_sampler.forward) == (sample, execute, verify)
