"""`bench compare`, `bench limits` and `export-target` over the command line; llama.cpp's server is played by a script."""

import json
import sys
import textwrap

import numpy as np
import pytest

from livedraft.gguf_file import read_gguf
from tests.e2e.in_process import livedraft
from tests.e2e.test_cli import assert_one_sentence

FAKE_SERVER = """
    #!{python}
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    if "--version" in sys.argv:
        sys.exit("version: 1234 (fake)")
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
            self.answer({{"tokens": body["prompt"][: body["n_predict"]], "tokens_predicted": body["n_predict"]}})
        def log_message(self, *arguments):
            pass
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text("\n".join(json.dumps({"turns": [f"Name {n} rivers."]}) for n in range(2, 5)))
    return file


@pytest.fixture
def fake_server(tmp_path):
    file = tmp_path / "llama-server"
    file.write_text(textwrap.dedent(FAKE_SERVER).strip().format(python=sys.executable))
    file.chmod(0o755)
    return file


def shown(*arguments):
    result = livedraft(*arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_engines_that_are_not_there_are_null(model_folder, prompts):
    result = shown(
        "bench",
        "compare",
        "--model",
        model_folder,
        "--prompts",
        prompts,
        "--max-tokens",
        6,
        "--dtype",
        "float32",
        "--json",
    )
    assert result["livedraft_plain"] > 0
    assert result["transformers_generate"] > 0
    assert result["llama_cpp_plain"] is None
    assert result["vllm_plain"] is None
    assert result["over_livedraft_plain"]["livedraft_plain"]["median"] == 1.0
    assert (result["prompts"], result["pairs"]) == (3, 3)
    assert result["versions"]["transformers"]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(240)
def test_llama_cpp_is_started_asked_and_stopped(smollm2_path, prompts, fake_server):
    result = shown(
        "bench",
        "compare",
        "--prompts",
        prompts,
        "--limit",
        1,
        "--max-tokens",
        4,
        "--llama-server",
        fake_server,
        "--json",
    )
    assert result["llama_cpp_plain"] > 0
    assert result["llama_cpp_own_file"] > 0
    assert result["llama_cpp_speculative"] is None
    assert "1234" in result["versions"]["llama_cpp"]


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
    assert set(result["cost_growth"]["ms_by_batch"]) == {"1", "2", "4", "8", "16", "32"}
    assert result["plain_round_ms"] > 0


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
