"""The front door: other families, a start that fails, a round that fails."""

import json
import time

import pytest

from livedraft import LLM, SamplingParams
from livedraft import llm as llm_room
from livedraft.learning.capture import write_secret
from livedraft.learning.store import Streams
from livedraft.records import UserError, is_held_out


def test_a_family_the_native_decoder_does_not_know_is_served_alone_and_as_a_draft(neox_folder, model_folder):
    options = {"dtype": "float32", "num_threads": 1}
    parameters = SamplingParams(max_tokens=10)
    with LLM(str(neox_folder), **options) as llm:
        plain = llm.generate("hello", parameters)[0]
    with LLM(str(neox_folder), draft=str(neox_folder), **options) as llm:
        assisted = llm.generate("hello", parameters)[0]
    assert assisted.token_ids == plain.token_ids
    with LLM(str(model_folder), draft="none", **options) as llm:
        native = llm.generate("hello", parameters)[0]
    with LLM(str(model_folder), draft=str(neox_folder), **options) as llm:
        assert llm.generate("hello", parameters)[0].token_ids == native.token_ids
        assert llm.engine.draft_version == neox_folder.name


def test_a_start_that_fails_gives_the_state_folder_back(model_folder, tmp_path):
    with pytest.raises(UserError, match="no draft 'v9'") as caught:
        LLM(str(model_folder), state=tmp_path, draft="v9")
    with LLM(str(model_folder), state=tmp_path):
        assert caught.value.__traceback__ is not None  # the failed one is still referenced


def test_a_round_that_fails_is_an_error_and_the_next_request_is_served(model_folder, monkeypatch):
    with LLM(str(model_folder), dtype="float32", num_threads=1) as llm:
        right = llm.generate("hello", SamplingParams(max_tokens=8))[0].token_ids
        draft = llm.engine.draft

        def fails(*_):
            raise MemoryError("say")

        monkeypatch.setattr(llm.engine.runner, "verify", fails)
        with pytest.raises(RuntimeError, match="failed on this request"):
            llm.generate("hello", SamplingParams(max_tokens=8))
        monkeypatch.undo()
        assert llm.generate("hello", SamplingParams(max_tokens=8))[0].token_ids == right
        assert llm.engine.draft is draft


def test_once_the_loop_owns_the_engine_generate_is_refused(model_folder):
    with LLM(str(model_folder), num_threads=1) as llm:
        llm.loop()
        with pytest.raises(RuntimeError, match="belongs to its loop"):
            llm.generate("hello")


def test_every_sampling_option_survives_the_trace_store(model_folder, tmp_path):
    from livedraft.learning.store import TraceStore

    sampling = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=4, max_tokens=4, stop=("never",), stop_token_ids=(7,),
        ignore_eos=True, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.5,
        logit_bias=((3, 1.5),), logprobs=2,
    )  # fmt: skip
    with LLM(str(model_folder), state=tmp_path, learn=True, num_threads=1) as llm:
        llm.generate("hello", sampling)
    store = TraceStore(tmp_path)
    (row,) = store.rows()
    assert store.read(row).sampling == sampling
    assert json.dumps(sampling.logit_bias)


def test_a_restart_remembers_what_was_said_and_a_deletion_forgets_it(model_folder, tmp_path):
    """For suffix proposals: texts are read from the traces while serving begins."""
    from livedraft.operations import delete_traces

    # What is held out is not among the texts, and a new folder would draw its key.
    write_secret(tmp_path, b"holds out none of the four")
    options = {"state": tmp_path, "learn": True, "dtype": "float32", "num_threads": 1}
    prompts = [f"question number {n}" for n in range(4)]
    sampling = SamplingParams(max_tokens=24)

    def texts(llm):
        deadline = time.monotonic() + 20
        while not llm.engine._offered_texts and time.monotonic() < deadline:
            time.sleep(0.02)
        llm.engine.step()
        return llm.engine.traffic["default"].num_tokens

    with LLM(str(model_folder), **options) as llm:
        assert not any(is_held_out(llm.request(prompt, sampling).conversation_key) for prompt in prompts)
        before = llm.generate(prompts, sampling)
    with LLM(str(model_folder), **options) as llm:
        num_tokens = texts(llm)
        after = llm.generate(prompts, sampling)
        said = llm.engine.stats_by_version["default", "suffix"]
    assert [o.token_ids for o in after] == [o.token_ids for o in before]
    assert num_tokens >= sum(len(o.token_ids) for o in before)
    assert said.acceptance_rate > 0.8
    delete_traces(tmp_path, None)
    with LLM(str(model_folder), **options) as llm:
        assert texts(llm) == 0


def test_padded_steps_say_what_the_plain_ones_say(model_folder, tmp_path):
    """With learning on, so that swaps find slots that are ready."""
    outputs = {}
    for graphs in (False, True):
        options = {"dtype": "float32", "num_threads": 1, "graphs": graphs, "device": "cpu", "draft": "untrained"}
        with LLM(str(model_folder), state=tmp_path / str(graphs), learn=True, **options) as llm:
            assert ("padded steps" in llm.path.description) == graphs
            if graphs:
                assert llm.resident_draft("untrained").is_stepwise is False
                assert llm._drafts._slots.num_slots == 3
            prompts = ["hello", "a b c d", "The quick brown fox"]
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            outputs[graphs] = [one.token_ids for one in llm.generate(prompts, sampling)]
            outputs[graphs] += [llm.generate(prompt, sampling)[0].token_ids for prompt in prompts]
    assert outputs[True] == outputs[False]


def test_after_a_restart_a_stream_is_read_into_the_texts_of_the_route_that_serves_it():
    """As `Drafting.route_of` has it while serving: given to another route's draft, its own, or the default one's."""
    found = llm_room._streams_by_route(["default", "a", "b"], {"x": "a", "b": "a", "y": "gone", "z": "default"})
    assert found == {
        "default": Streams(names=("a", "b", "x")),
        "a": Streams(names=("a", "b", "x"), are_left_out=False),
        "b": Streams(names=(), are_left_out=False),
    }
