"""`traces export` and `import` over the real command line: round trips, other tools' formats, bad files."""

import json
import os
import stat

import numpy as np
import pytest

from livedraft import LLM, SamplingParams
from livedraft.cli.exchange import _messages, _write_whole, read_records
from livedraft.config import EngineConfig
from livedraft.engine.judging import judged_trace
from livedraft.learning.capture import conversation_key, load_secret
from livedraft.learning.store import TraceStore
from livedraft.records import UserError
from livedraft.tokenizer import load_tokenizer
from tests.e2e.in_process import livedraft
from tests.e2e.test_cli import assert_one_sentence

CHAT = [{"role": "user", "content": "What floats?"}]


def run(*arguments):
    result = livedraft(*arguments)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def served(model_folder, tmp_path_factory):
    """A state with four traces: two chats, a plain prompt, one sampled."""
    state = tmp_path_factory.mktemp("served")
    with LLM(str(model_folder), state=state, learn=True, dtype="float32", num_threads=1) as llm:
        llm.generate([CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]], SamplingParams(max_tokens=12))
        llm.generate("Once upon", SamplingParams(max_tokens=9, ignore_eos=True))
        llm.generate("There was", SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True))
    return state


def traces_of(state):
    store = TraceStore(state)
    return [store.read(row) for row in store.rows()]


def test_a_file_that_is_cut_short_is_none_and_the_old_one_stays(tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text("old")

    def cut_short(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _write_whole(file, cut_short)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    _write_whole(file, lambda path: path.write_text("new"))
    assert file.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _write_whole(pipe, lambda path: path.write_text("through"))
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(("format", "num_kept"), [("openai", 4), ("prompts", 4), ("tokens", 4), ("traces", 4)])
def test_what_is_exported_comes_back(served, model_folder, tmp_path, format, num_kept):
    file = tmp_path / ("out.safetensors" if format == "traces" else "out.jsonl")
    exported = run("traces", "export", file, "--format", format, "--model", model_folder, "--state", served)
    assert f"{num_kept} traces written" in exported.stderr
    state = tmp_path / "state"
    options = ("--model", model_folder, "--dtype", "float32", "--state", state, "--max-tokens", 12)
    assert f"{num_kept} traces imported" in run("traces", "import", file, *options).stdout
    before = traces_of(served)
    after = {tuple(trace.prompt_token_ids): trace for trace in traces_of(state)}
    assert len(after) == num_kept
    for trace in before:
        again = after.get(tuple(trace.prompt_token_ids))
        if again is None:
            continue
        assert again.draft_version == "none"
        if format in ("tokens", "traces") and trace.sampling.is_greedy:
            assert again.output_token_ids == trace.output_token_ids
            # The target's verdicts are those it gave when serving.
            np.testing.assert_allclose(
                again.teacher_log_probs_TK[:, :8].astype(np.float32),
                trace.teacher_log_probs_TK[:, :8].astype(np.float32),
                atol=0.02,
            )


def test_judging_an_answer_gives_what_serving_it_gave(model_folder):
    """Also over several passes, and the first position too."""
    with LLM(
        str(model_folder), draft="none", dtype="float32", num_threads=1, engine=EngineConfig(max_model_len=500)
    ) as llm:
        traces = []
        llm.engine.trace_sink = traces.append
        request = llm.request("x" * 200, SamplingParams(max_tokens=280, ignore_eos=True))
        llm.add([request])
        llm.run()
        (served,) = traces
        judged = judged_trace(llm.engine.runner.target, request, served.output_token_ids, served.target_fingerprint)
        for name in ("teacher_token_ids_TK", "teacher_log_probs_TK", "tail_mass_T"):
            found, expected = getattr(judged, name), getattr(served, name)
            assert found.shape == expected.shape
        np.testing.assert_allclose(judged.tail_mass_T, served.tail_mass_T, atol=1e-3)
        assert (judged.teacher_token_ids_TK[:, 0] == np.array(served.output_token_ids)).mean() > 0.99
        assert judged.output_token_ids == served.output_token_ids
        for output in ([], [9999], [1] * 600):
            with pytest.raises(ValueError):
                judged_trace(llm.engine.runner.target, request, output, "f")


@pytest.mark.model
def test_chats_are_found_again_in_their_tokens(smollm2_path):
    """Where the model's template is ChatML, and only if it gives back exactly the tokens that were served."""
    tokenizer = load_tokenizer(smollm2_path, ())
    system = {"role": "system", "content": "Be brief."}
    for messages in (CHAT, [system, *CHAT], [*CHAT, {"role": "assistant", "content": "Boats.\n"}, *CHAT]):
        token_ids = tokenizer.encode_chat(messages)
        prompt = tokenizer.decode(token_ids, with_special_tokens=True)
        found = _messages(prompt, token_ids, tokenizer)
        assert found is not None
        assert found[-len(messages) :] == messages  # the template puts its own system message before
        assert tokenizer.encode_chat(found) == token_ids
        assert _messages(prompt, token_ids[1:], tokenizer) is None


def test_imported_traces_belong_to_the_user_who_is_named(served, model_folder, tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text('{"prompt": "a b", "completion": " c"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    state = tmp_path / "state"
    run("traces", "import", file, "--model", model_folder, "--state", state, "--user", "ann", "--max-tokens", 4)
    keys = {trace.client_key for trace in traces_of(state)}
    assert keys == {conversation_key(["ann"], load_secret(state))}
    assert run("traces", "delete", "--user", "ann", "--state", state).stdout.startswith("2 traces")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": [*CHAT, {"role": "assistant", "content": "Boats."}]}, {"messages": CHAT, "answer": "Boats."}),
        ({"messages": CHAT}, {"messages": CHAT}),
        (
            {"conversations": [{"from": "human", "value": "What floats?"}, {"from": "gpt", "value": "Boats."}]},
            {"messages": CHAT, "answer": "Boats."},
        ),
        ({"prompt": "a", "completion": "b"}, {"text": "a", "answer": "b"}),
        ({"prompt": "a"}, {"text": "a"}),
        ({"turns": ["What floats?", "More."]}, {"messages": CHAT}),
        ({"prompt_token_ids": [1, 2], "output_token_ids": [3]}, {"prompt_token_ids": [1, 2], "output_token_ids": [3]}),
    ],
)
def test_formats_are_known_by_their_fields(tmp_path, line, expected):
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (record,) = read_records(file, None, None)
    fields = {name: value for name, value in vars(record).items() if value not in (None, False)}
    assert fields == expected
    plain = tmp_path / "f.txt"
    plain.write_text("one prompt\nanother\n")
    assert [one.text for one in read_records(plain, "prompts", 1)] == ["one prompt"]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[1]", "{}", '{"messages": []}', '{"messages": [{"role": "system", "content": "x"}]}', '{"prompt": 3}',
     '{"conversations": [{"from": "bird", "value": "x"}]}', '{"prompt_token_ids": ["a"]}', '{"prompt_token_ids": []}'],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, line):
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match="Line 2 of"):
        read_records(file, None, None)


def test_bad_files_are_one_sentence(served, model_folder, tmp_path):
    here = ("--model", model_folder, "--state", tmp_path / "state")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "x.safetensors").write_bytes(b"no shard")
    (tmp_path / "wrong.jsonl").write_text('{"prompt_token_ids": [5000]}\n')
    for name, words in (("missing.jsonl", "cannot be read"), ("empty.jsonl", "no record"), ("x.safetensors", "cannot be read"),
                        ("wrong.jsonl", "No record could be used")):  # fmt: skip
        assert_one_sentence(livedraft("traces", "import", tmp_path / name, *here), words)
    assert_one_sentence(livedraft("traces", "export", tmp_path / "o", "--format", "pdf", *here), "--format")
    assert_one_sentence(
        livedraft("traces", "export", tmp_path / "no" / "o", "--state", served, "--model", model_folder),
        "cannot be written",
    )
    assert_one_sentence(livedraft("traces", "delete", "--state", served), "Say whose")
    sharegpt = ("--format", "sharegpt", "--state", served, "--model", model_folder)
    assert_one_sentence(livedraft("traces", "export", tmp_path / "o", *sharegpt), "No trace is a chat")
