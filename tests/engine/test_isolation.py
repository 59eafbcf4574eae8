"""One request never harms another: cancellation at any moment, failures, a draft that breaks, a draft that is too short."""

import dataclasses
import time

import pytest
import torch

from livedraft.config import EngineConfig
from livedraft.drafts.weights import serving_weights
from livedraft.engine.loop import EngineLoop
from livedraft.models.decoder import Decoder
from livedraft.speculation.draft_model import DraftModel
from livedraft.tokenizer import TextStream, Tokenizer
from tests.hf_folder import byte_tokenizer
from tests.tiny import FLOAT32, PROMPTS, decoder, draft_model, engine, perturbed_draft, random_model, request, serve

MODEL = random_model()
ALONE = [serve(engine(decoder(MODEL), None), [request(p, i)])[0] for i, p in enumerate(PROMPTS)]


def drafting_engine(**options):
    target = decoder(MODEL)
    return engine(target, draft_model(perturbed_draft(MODEL, noise=0.1), target, keep_logits=True), **options)


class BrokenGrammar:
    """Allows everything, and raises after some tokens."""

    def __init__(self, lasts):
        self.left = lasts

    def allowed_tokens(self):
        if self.left <= 0:
            raise RuntimeError("the grammar broke")
        return torch.ones(64, dtype=torch.bool).numpy()

    def advance(self, token_id):
        self.left -= 1
        return True

    def retreat(self, num_tokens):
        self.left += num_tokens


@pytest.mark.parametrize("cancelled", range(4))
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_cancelling_at_any_moment_frees_the_slot_and_changes_nobody_else(cancelled, after):
    served = drafting_engine(config=EngineConfig(max_num_seqs=3, max_model_len=128, prefill_token_budget=4))
    states = [served.add_request(request(p, i)) for i, p in enumerate(PROMPTS)]  # the fourth has to wait
    for _ in range(after):
        served.step()
    assert served.cancel(f"r{cancelled}") is states[cancelled]
    assert served.cancel(f"r{cancelled}") is None
    while served.has_work:
        served.step()
    assert states[cancelled].finish_reason == "cancelled"
    for index, state in enumerate(states):
        if index != cancelled:
            assert state.output_token_ids == ALONE[index]
    assert sorted(served.scheduler._free_slots) == [0, 1, 2]


@pytest.mark.parametrize("lasts", [0, 1, 4])
def test_a_grammar_that_breaks_fails_its_request_alone(lasts):
    traces = []
    served = drafting_engine(trace_sink=traces.append)
    broken = dataclasses.replace(request(PROMPTS[1], 1), grammar=BrokenGrammar(lasts))
    states = [served.add_request(one) for one in (request(PROMPTS[0], 0), broken, request(PROMPTS[2], 2))]
    while served.has_work:
        served.step()
    assert states[1].finish_reason == "error"
    assert states[1].error
    assert [states[0].output_token_ids, states[2].output_token_ids] == [ALONE[0], ALONE[2]]
    assert {trace.request_id for trace in traces} == {"r0", "r2"}
    assert served.draft is not None


@pytest.mark.parametrize("mode", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_a_target_that_gives_no_numbers_fails_only_the_rows_it_spoils(monkeypatch, mode):
    served = drafting_engine()
    states = [served.add_request(request(p, i, **mode)) for i, p in enumerate(PROMPTS[:2])]
    served.step()
    right = served.runner.verify

    def spoiled(entries, proposals):
        logits = right(entries, proposals)
        return [torch.full_like(rows, torch.nan) if e.state is states[1] else rows for e, rows in zip(entries, logits)]

    monkeypatch.setattr(served.runner, "verify", spoiled)
    while served.has_work:
        served.step()
    assert [state.finish_reason for state in states] == ["length", "error"]


def test_numbers_that_are_none_do_not_stay_in_the_slot():
    """A later, shorter request in that slot, batched with a longer one, reads past its own positions, masked."""
    served = drafting_engine()
    spoiled = served.add_request(request([1] * 40, 0, max_tokens=60))
    other = served.add_request(request(PROMPTS[0], 1, max_tokens=8))
    for _ in range(3):
        served.step()
    served.runner.target.cache._storage[:, :, spoiled.slot, :, 20:60] = torch.nan
    while served.has_work:
        served.step()
    assert spoiled.finish_reason == "error"
    assert other.output_token_ids == ALONE[0][:8]
    outputs = serve(served, [request(PROMPTS[1], 2), request([1] * 40, 3)])
    assert outputs[0] == ALONE[1]


def test_what_fails_at_the_end_of_a_request_harms_nobody():
    def fails(trace):
        raise OSError("no room")

    served = drafting_engine(trace_sink=fails)
    events = []
    served.events.subscribe(events.append)
    assert serve(served, [request(p, i) for i, p in enumerate(PROMPTS)]) == ALONE
    assert len([event for event in events if event["event"] == "finish_failed"]) == 4


def test_the_drafts_catch_up_is_shared_by_the_round(monkeypatch):
    """After a swap under four contexts, no draft pass is larger than the budget, and the answers are the same."""
    monkeypatch.setattr("livedraft.speculation.draft_model.MAX_CATCH_UP", 30)
    prompts = [[(3 * n + i) % 64 for i in range(20)] for n in range(4)]
    target = decoder(MODEL)
    served = engine(target, None)
    states = [served.add_request(request(p, i, max_tokens=40)) for i, p in enumerate(prompts)]
    for _ in range(4):
        served.step()
    draft = draft_model(perturbed_draft(MODEL, noise=0.0), target)
    sizes, right = [], draft.decoder.forward
    draft.decoder.forward = lambda tokens, *rest: (sizes.append(len(tokens)), right(tokens, *rest))[1]
    served.offer_draft(draft)
    while served.has_work:
        served.step()
    assert max(sizes) == 30
    plain = serve(engine(decoder(MODEL), None), [request(p, i, max_tokens=40) for i, p in enumerate(prompts)])
    assert [state.output_token_ids for state in states] == plain
    assert all(state.stats.num_accepted_tokens > 5 for state in states)


def test_predictions_are_counted_apart_from_the_draft_and_bounded():
    served = drafting_engine()
    one = dataclasses.replace(request(PROMPTS[0]), prediction_token_ids=tuple(ALONE[0][:10]))
    state = served.add_request(one)
    while served.has_work:
        served.step()
    assert state.output_token_ids == ALONE[0]
    # Three a round and the target's own fourth.
    assert 6 <= state.num_accepted_prediction_tokens <= 10
    assert state.stats.num_draft_tokens == served.stats.num_draft_tokens
    by_prediction = served.stats_by_version["default", "prediction"]
    assert by_prediction.num_accepted_tokens == state.num_accepted_prediction_tokens
    with pytest.raises(ValueError, match="prediction has 129 tokens"):
        served.add_request(dataclasses.replace(one, prediction_token_ids=(1,) * 129))
    plain = drafting_engine(k=0)
    state = plain.add_request(one)
    while plain.has_work:
        plain.step()
    assert state.num_prediction_tokens == 0


def test_a_draft_that_raises_goes_out_of_service_and_no_answer_changes(monkeypatch):
    served = drafting_engine()
    events = []
    served.events.subscribe(events.append)
    states = [served.add_request(request(p, i)) for i, p in enumerate(PROMPTS)]
    served.step()
    served.step()
    monkeypatch.setattr(served.draft, "propose", lambda tasks: 1 / 0)
    while served.has_work:
        served.step()
    assert [state.output_token_ids for state in states] == ALONE
    assert served.draft_version == "none"
    assert [e["reason"] for e in events if e["event"] == "draft_failed"] == ["ZeroDivisionError: division by zero"]


def test_past_the_drafts_context_only_that_request_decodes_plainly():
    target = decoder(MODEL)
    weights = perturbed_draft(MODEL, noise=0.0)
    short = Decoder(
        target.config,
        serving_weights(weights, target.weights, FLOAT32, target.config),
        num_slots=4,
        max_length=20,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    served = engine(target, DraftModel(short, weights.draft_to_target_W, version="short"), k=4)
    events = []
    served.events.subscribe(events.append)
    prompts = [[5, 9, 3], [1] * 30]
    states = [served.add_request(request(p, i, max_tokens=40)) for i, p in enumerate(prompts)]
    while served.has_work:
        served.step()
    for prompt, state in zip(prompts, states):
        assert state.output_token_ids == serve(engine(decoder(MODEL), None), [request(prompt, max_tokens=40)])[0]
    assert states[0].stats.acceptance_rate == 1.0  # until its own context passed the draft's
    assert states[0].stats.num_draft_tokens >= 12
    assert states[1].stats.num_draft_tokens == 0
    passed = [event["request"] for event in events if event["event"] == "draft_limit_passed"]
    assert sorted(passed) == ["r0", "r1"]  # once each


def test_a_long_prompt_does_not_stall_the_others():
    """While 100 prompt tokens are written 8 a round, a running request gets tokens every round."""
    served = drafting_engine(config=EngineConfig(max_num_seqs=2, max_model_len=128, prefill_token_budget=8))
    running = served.add_request(request(PROMPTS[0], 0, max_tokens=60))
    served.step()
    long = served.add_request(request([3] * 100, 1, max_tokens=4))
    while long.num_output_tokens == 0:
        before = running.num_output_tokens
        served.step()
        assert running.num_output_tokens > before
    assert running.num_rounds >= 12


def test_requests_own_draft_length_is_a_ceiling():
    served = drafting_engine(k=3)
    requests = [dataclasses.replace(request(p, i), num_speculative_tokens=i) for i, p in enumerate(PROMPTS[:3])]
    states = [served.add_request(one) for one in requests]
    while served.has_work:
        served.step()
    assert states[0].stats.num_draft_tokens == 0
    assert [len(state.stats.num_accepted_tokens_per_pos) for state in states] == [0, 1, 2]
    assert [state.output_token_ids for state in states] == ALONE[:3]


# --- the loop around it ---------------------------------------------------------------------------------------------


class Receiver:
    def __init__(self, raises_after=None):
        import threading

        self.updates, self.ended, self.raises_after = [], threading.Event(), raises_after

    def __call__(self, update):
        if self.raises_after is not None and len(self.updates) >= self.raises_after:
            self.ended.set()
            raise ConnectionError("gone")
        self.updates.append(update)
        if update.finish_reason:
            self.ended.set()

    @property
    def tokens(self):
        return [token for update in self.updates for token in update.token_ids]


@pytest.fixture
def loop():
    busy = []
    made = EngineLoop(drafting_engine(), num_threads=1, on_busy=busy.append)
    made.busy = busy
    yield made
    made.close()


def test_the_loop_hands_every_token_over_once_with_the_counts_at_the_end(loop):
    receivers = [Receiver() for _ in PROMPTS]
    for index, (prompt, receiver) in enumerate(zip(PROMPTS, receivers)):
        loop.submit(request(prompt, index), receiver)
    for receiver, alone in zip(receivers, ALONE):
        assert receiver.ended.wait(20)
        assert receiver.tokens == alone
        last = receiver.updates[-1]
        assert last.finish_reason == "length"
        assert last.counts.num_emitted_tokens == len(alone)
        assert last.counts.num_accepted_tokens <= last.counts.num_draft_tokens
        assert all(update.counts is None for update in receiver.updates[:-1])
        rounds = [update for update in receiver.updates if update.token_ids]
        assert sum(update.num_drafted for update in rounds) == last.counts.num_draft_tokens
        assert sum(update.num_accepted for update in rounds) == last.counts.num_accepted_tokens > 0
        for update in rounds:
            assert len(update.token_ids) in (update.num_accepted, update.num_accepted + 1)
            assert (update.proposer is None) == (update.num_drafted == 0)
    snapshot = loop.snapshot()
    assert snapshot["num_emitted_tokens"] == sum(map(len, ALONE))
    assert 0 < snapshot["busy_seconds"] < 20
    busy, idle = loop.busy_and_idle_seconds()
    time.sleep(0.05)
    assert loop.busy_and_idle_seconds() == (
        busy,
        pytest.approx(idle + 0.05, abs=0.04),
    )  # idle time counts while it lasts
    assert snapshot["estimated_plain_seconds"] > 0
    (report,) = snapshot["drafts"]
    assert (report["version"], report["k"], report["is_second"]) == (loop.engine.draft_version, 3, False)
    assert len(report["acceptance_by_position"]) == 3
    assert snapshot["num_requests_running"] == snapshot["num_requests_waiting"] == 0
    assert snapshot["finished"] == {"length": 4}
    assert snapshot["generation_tokens"] == sum(map(len, ALONE))
    assert loop.busy[0] is True


def test_a_receiver_that_raises_loses_its_request_and_nobody_elses(loop):
    broken, good = Receiver(raises_after=1), Receiver()
    loop.submit(request(PROMPTS[0], 0), broken)
    loop.submit(request(PROMPTS[1], 1), good)
    assert broken.ended.wait(20)
    assert good.ended.wait(20)
    assert good.tokens == ALONE[1]
    later = Receiver()
    loop.submit(request(PROMPTS[2], 2), later)
    assert later.ended.wait(20)
    assert later.tokens == ALONE[2]
    assert loop.snapshot()["num_requests_running"] == 0


def test_a_round_that_raises_fails_its_requests_and_the_loop_goes_on(loop):
    engine_ = loop.engine
    right = engine_.runner.verify
    first, waiting = Receiver(), Receiver()

    def raises_once(entries, proposals):
        engine_.runner.verify = right
        raise RuntimeError("out of memory, say")

    engine_.runner.verify = raises_once
    loop.submit(request(PROMPTS[0], 0), first)
    assert first.ended.wait(20)
    assert first.updates[-1].finish_reason == "error"
    loop.submit(request(PROMPTS[1], 1), waiting)
    assert waiting.ended.wait(20)
    assert waiting.tokens == ALONE[1]


def test_a_command_that_raises_does_not_end_the_thread(loop, monkeypatch):
    monkeypatch.setattr(loop.engine.scheduler, "release", lambda state: 1 / 0)
    first = Receiver()
    loop.submit(request(PROMPTS[0], 0, max_tokens=100), first)
    loop.cancel("r0")
    loop.cancel("unknown")
    time.sleep(0.2)
    monkeypatch.undo()
    assert loop._thread.is_alive()
    later = Receiver()
    loop.submit(request(PROMPTS[1], 1), later)
    assert later.ended.wait(20)
    assert later.tokens == ALONE[1]


def test_a_request_that_cannot_be_queued_is_answered(loop):
    receiver = Receiver()
    loop.submit(request([1] * 500, 0), receiver)
    assert receiver.ended.wait(20)
    assert "limit of 128" in receiver.updates[-1].error


def test_closing_while_the_thread_looks_for_work_is_not_missed(loop):
    """The wake-up of `close` falls between the look at the inbox and the wait."""
    right = loop._wake.clear

    def clear_late():
        loop._closing = True
        right()

    loop._wake.clear = clear_late
    loop._wake.set()
    loop._thread.join(timeout=10)
    assert not loop._thread.is_alive()


def test_closing_cancels_what_runs_and_ends_the_thread(loop):
    receiver = Receiver()
    loop.submit(request(PROMPTS[0], 0, max_tokens=120), receiver)
    while not receiver.updates:
        time.sleep(0.001)
    loop.close()
    loop.close()
    assert receiver.updates[-1].finish_reason in ("cancelled", "length")
    assert not loop._thread.is_alive()


def test_stop_strings_need_a_tokenizer_and_are_found_inside_the_block():
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        drafting_engine().add_request(request(PROMPTS[0], stop=("a",)))
    tokenizer = Tokenizer(byte_tokenizer())
    target = decoder(MODEL)
    text = tokenizer.decode(ALONE[0])
    for start in range(0, len(text) - 1, 3):
        stop = text[start : start + 2]
        served = engine(
            target,
            draft_model(perturbed_draft(MODEL, noise=0.0), target),
            k=5,
            text_stream=lambda stop: TextStream(tokenizer, stop),
        )
        state = served.add_request(request(PROMPTS[0], stop=(stop,)))
        while served.has_work:
            served.step()
        cut = next(n for n in range(1, 25) if stop in tokenizer.decode(ALONE[0][:n]))
        assert (state.output_token_ids, state.finish_reason, state.stop_reason) == (ALONE[0][:cut], "stop", stop)


def test_a_stop_within_max_tokens_wins_and_one_beyond_it_is_length():
    served = drafting_engine(k=5)
    token = ALONE[0][9]
    first = ALONE[0].index(token)
    for max_tokens, reason in ((first + 1, "stop"), (first + 2, "stop"), (first, "length")):
        if max_tokens < 1:
            continue
        state = served.add_request(request(PROMPTS[0], stop_token_ids=(token,), max_tokens=max_tokens))
        while served.has_work:
            served.step()
        assert (state.finish_reason, state.num_output_tokens) == (reason, min(max_tokens, first + 1))
