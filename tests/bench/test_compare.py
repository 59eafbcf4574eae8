"""`bench compare`, `limits`, `growth`, `unhelpful` and `export-target` over the command line; llama.cpp's server and vLLM are
played by scripts."""

import dataclasses
import json
import sys
import textwrap

import numpy as np
import pytest
import torch

from livedraft.bench.growth import judged
from livedraft.bench.rivals import llama_draft_flags
from livedraft.bench.unhelpful import randomised
from livedraft.drafts.weights import save_draft
from livedraft.gguf_file import read_gguf
from livedraft.llm import LLM
from tests.e2e.in_process import livedraft
from tests.e2e.test_cli import assert_one_sentence

FAKE_SERVER = """
    #!{python}
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    if "--version" in sys.argv:
        sys.exit("version: 1234 (fake)")
    if "--help" in sys.argv:
        sys.exit("--spec-type none,draft-simple   default: none" if {knows_kinds} else "--model-draft FILE")
    class Handler(BaseHTTPRequestHandler):
        def answer(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def do_GET(self):
            self.answer({{"status": "ok"}})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["temperature"] == 0 and body["cache_prompt"] is False
            drafted = {{"draft_n": 4, "draft_n_accepted": 3}} if "--spec-type" in sys.argv else {{}}
            tokens = body["prompt"][: body["n_predict"]]
            self.answer({{"tokens": tokens, "tokens_predicted": body["n_predict"], "timings": drafted}})
        def log_message(self, *arguments):
            pass
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text("\n".join(json.dumps({"turns": [f"Name {n} rivers."]}) for n in range(2, 5)))
    return file


def fake_llama_server(file, knows_kinds):
    """One that drafts only when it is told the kind of drafting."""
    file.write_text(textwrap.dedent(FAKE_SERVER).strip().format(python=sys.executable, knows_kinds=knows_kinds))
    file.chmod(0o755)
    return file


@pytest.fixture
def fake_server(tmp_path):
    return fake_llama_server(tmp_path / "llama-server", knows_kinds=True)


def shown(*arguments):
    result = livedraft(*arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_engines_that_are_not_there_are_null(model_folder, prompts):
    result = shown(
        "bench", "compare", "--model", model_folder, "--prompts", prompts, "--max-tokens", 6, "--dtype", "float32", "--json"
    )  # fmt: skip
    assert result["livedraft_plain"] > 0
    assert result["transformers_generate"] > 0
    assert result["over_livedraft_plain"]["livedraft_plain"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (result["prompts"], result["pairs"], result["batch"], result["temperature"]) == (3, 3, 1, 0)
    assert result["versions"]["transformers"] and result["hardware"]["cores"] >= 1
    for name, reason in {"llama_cpp_plain": "--llama-server", "vllm_plain": "--vllm-python",
                         "transformers_assisted": "no learned draft"}.items():  # fmt: skip
        assert result[name] is None
        assert reason in result["not_run"][name]
    # In float32 all engines give the same tokens, speculation too.
    same = result["same_output"]
    assert same["livedraft_speculative"] == {"identical": 3, "of": 3, "share_before_difference": 1.0}
    assert same["transformers_generate"]["identical"] == 3


def untrained_folder(model, folder):
    """A draft's folder as `distill` leaves it."""
    with LLM(str(model), draft="untrained", dtype="float32") as llm:
        weights, version = llm.untrained_draft()
    folder.mkdir()
    save_draft(weights, folder / "draft.safetensors")
    (folder / "manifest.json").write_text(json.dumps(dataclasses.asdict(version)))
    return folder


@pytest.fixture
def learned(model_folder, tmp_path):
    return untrained_folder(model_folder, tmp_path / "learned")


@pytest.mark.long
def test_each_batch_size_and_temperature_is_a_setting(model_folder, prompts, learned, tmp_path):
    plot = tmp_path / "speeds.svg"
    result = shown(
        "bench", "compare", "--model", model_folder, "--prompts", prompts, "--max-tokens", 5, "--dtype", "float32",
        "--batch", 1, "--batch", 2, "--temperature", 0, "--temperature", 1, "--limit", 2, "--draft", learned, "--plot", plot,
        "--json",
    )  # fmt: skip
    settings = {(one["batch"], one["temperature"]): one for one in result["settings"]}
    assert list(settings) == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert {name: value for name, value in result.items() if name in settings[1, 0.0]} == settings[1, 0.0]
    for (batch, temperature), one in settings.items():
        assert one["prompts"] == 2 * batch
        assert one["livedraft_speculative"] > 0
        low, high = one["intervals"]["transformers_generate"]
        assert low <= one["transformers_generate"] <= high
        assert (one["transformers_assisted"] is None) == (batch > 1)
        assert (one["same_output"] is None) == (batch > 1 or temperature > 0)
    assert "batch 1 only" in settings[2, 0.0]["not_run"]["transformers_assisted"]
    assert settings[1, 0.0]["same_output"]["transformers_assisted"]["identical"] == 2
    assert plot.read_text().count("batch") >= 4


FAKE_VLLM = """
    __version__ = "0.99"
    class SamplingParams:
        def __init__(self, **fields):
            self.fields = fields
    class Output:
        def __init__(self, ids):
            self.token_ids, self.outputs = ids, [self]
    class LLM:
        def __init__(self, model, **settings):
            import pathlib
            assert pathlib.Path(model, "config.json").exists() and settings["dtype"] == "float32"
            if "speculative_config" in settings:
                assert pathlib.Path(settings["speculative_config"]["model"], "model.safetensors").exists()
            print("chatter that must not reach the pipe")
        def generate(self, prompts, sampling, use_tqdm):
            return [Output(one["prompt_token_ids"][: sampling.fields["max_tokens"]]) for one in prompts]
"""


@pytest.mark.long
def test_vllm_answers_from_its_own_interpreter(model_folder, prompts, learned, tmp_path):
    (tmp_path / "vllm.py").write_text(textwrap.dedent(FAKE_VLLM))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    here = ("bench", "compare", "--model", model_folder, "--prompts", prompts, "--max-tokens", 3, "--limit", 1, "--draft",
            learned, "--dtype", "float32", "--json")  # fmt: skip
    result = shown(*here, "--temperature", 0, "--temperature", 1, "--vllm-python", python)
    assert result["vllm_plain"] > 0
    assert result["versions"]["vllm"] == "0.99, cpu"
    assert "num_speculative_tokens" in result["commands"]["vllm_speculative"]
    greedy, sampled = result["settings"]
    assert greedy["vllm_speculative"] > 0
    assert sampled["vllm_speculative"] is None and "CPU build" in sampled["not_run"]["vllm_speculative"]
    (tmp_path / "vllm.py").write_text("raise ImportError('its own reason')")
    assert_one_sentence(livedraft(*here, "--vllm-python", python), "its own reason")
    assert_one_sentence(livedraft(*here, "--vllm-python", tmp_path / "nowhere"), "--vllm-python")


def test_a_server_is_told_to_draft_where_naming_a_draft_is_not_enough(fake_server, tmp_path):
    draft = tmp_path / "draft.gguf"
    assert llama_draft_flags(fake_server, draft) == ("--model-draft", str(draft), "--spec-type", "draft-simple")
    old = fake_llama_server(tmp_path / "old", knows_kinds=False)
    assert llama_draft_flags(old, draft) == ("--model-draft", str(draft))


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(240)
@pytest.mark.parametrize("drafts", [True, False])
def test_llama_cpp_is_started_asked_and_stopped(smollm2_path, prompts, tmp_path, drafts):
    learned = untrained_folder(smollm2_path, tmp_path / "learned")
    server = fake_llama_server(tmp_path / "llama-server", knows_kinds=drafts)
    result = shown(
        "bench", "compare", "--prompts", prompts, "--limit", 1, "--max-tokens", 4, "--draft", learned, "--llama-server", server,
        "--json",
    )  # fmt: skip
    assert result["llama_cpp_plain"] > 0
    assert result["llama_cpp_own_file"] > 0
    assert "1234" in result["versions"]["llama_cpp"]
    if drafts:
        assert result["llama_cpp_speculative"] > 0
        assert result["acceptance_rate"] == {"llama_cpp_speculative": 0.75}
    else:  # its speed would be plain decoding's under another name
        assert result["llama_cpp_speculative"] is None
        assert "drafted nothing" in result["not_run"]["llama_cpp_speculative"]


def test_what_cannot_be_compared_is_one_sentence(model_folder, prompts, fake_server, tmp_path):
    here = ("bench", "compare", "--model", model_folder, "--prompts", prompts, "--max-tokens", 2)
    assert_one_sentence(livedraft(*here, "--llama-server", tmp_path / "nowhere"), "cannot be run")
    assert_one_sentence(livedraft(*here, "--llama-server", fake_server), "GGUF models only")
    assert_one_sentence(livedraft("export-target", tmp_path / "o.gguf", "--model", model_folder), "no GGUF file")


@pytest.mark.timeout(180)
def test_limits_of_a_tiny_model(model_folder):
    result = shown("bench", "limits", "--model", model_folder, "--dtype", "float32", "--threads", 1, "--json")
    assert result["read_gb_per_second"] > 0.1
    path = result["paths"]["torch"]
    assert set(path["ms"]) == set(path["V"]) == {"1", "2", "4", "6", "8", "16", "32", "64"}
    assert path["V"]["1"] == 1.0
    assert path["bytes"] > 0
    assert result["plain_round_ms"] > 0


def test_growth_is_measured_and_judged(model_folder, tmp_path):
    plot = tmp_path / "growth.svg"
    result = shown(
        "bench", "growth", "--model", model_folder, "--dtype", "float32", "--threads", 1, "--plot", plot, "--json"
    )  # fmt: skip
    assert set(result["ms_a_pass"]["by_batch_at_128"]) == {"1", "2", "4", "8", "16", "32"}
    assert set(result["growth"]) == set(result["ms_a_pass"])
    assert all(size.isdigit() and ms > 0 for size, ms in result["ms_a_pass"]["by_context"].items())
    assert result["prompt_tokens_per_second"] > 0
    assert "requests" in plot.read_text()


def test_worse_than_linear_is_seen():
    read = {"1": 1.0, "2": 2.0, "4": 4.0}
    assert judged({"1": 3.0, "2": 6.0, "4": 12.0}, read) == {
        "exponent": 1.0, "worst_over_linear": 1.0, "is_linear_at_most": True
    }  # fmt: skip
    square = judged({"1": 3.0, "2": 12.0, "4": 48.0}, read)
    assert square == {"exponent": 2.0, "worst_over_linear": 4.0, "is_linear_at_most": False}
    assert judged({"1": 3.0, "2": 3.1, "4": 3.2}, read)["exponent"] < 0.1


def test_an_unhelpful_draft_is_timed_beside_plain(model_folder):
    result = shown(
        "bench", "unhelpful", "--model", model_folder, "--dtype", "float32", "--batch", 1, "--batch", 2, "--pairs", 2,
        "--max-tokens", 20, "--json",
    )  # fmt: skip
    assert [row["batch"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert row["num_tokens"] >= row["batch"] * 2 * 20
        assert row["num_draft_tokens"] < row["num_tokens"] / 2  # seen to be of no use, and left
    with LLM(str(model_folder), draft="untrained", dtype="float32") as llm:
        weights = llm.draft_weights("untrained")
    random = randomised(weights)
    assert {name: t.shape for name, t in random.tensors.items()} == {n: t.shape for n, t in weights.tensors.items()}
    assert not torch.equal(random.tensors["head"], weights.tensors["head"])


@pytest.mark.long
@pytest.mark.model
def test_an_exported_target_is_the_same_model_in_bf16(smollm2_path, tmp_path):
    file = tmp_path / "target.gguf"
    assert "tensors written" in livedraft("export-target", file).stdout
    metadata, tensors = read_gguf(file)
    original, before = read_gguf(smollm2_path)
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == original["tokenizer.ggml.tokens"]
    assert metadata["llama.block_count"] == original["llama.block_count"]
    from gguf import dequantize

    by_name = {tensor.name: tensor for tensor in before}
    assert {tensor.name for tensor in tensors} == set(by_name)
    for tensor in tensors[:20]:
        values, right = (
            dequantize(one.data, one.tensor_type).astype(np.float64) for one in (tensor, by_name[tensor.name])
        )
        assert values.shape == right.shape
        assert np.abs(values - right).max() <= np.abs(right).max() * 2**-8
    assert_one_sentence(livedraft("export-target", smollm2_path), "another file")
