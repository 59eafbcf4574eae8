"""The command line, as a user runs it; where nothing hangs on the process, without one. Errors: one sentence, exit code 1, no
traceback."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.in_process import livedraft
from tests.hf_folder import TEXT_CONFIG, byte_tokenizer, write_hf_folder, write_text_model
from tests.tiny import random_tensors


def real_livedraft(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "livedraft", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def assert_one_sentence(result, *words):
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("livedraft: ")
    for word in words:
        assert word in last


def generate(model, *arguments, run=livedraft, **environment):
    return run("generate", "hello there", "--model", model, "--max-tokens", 12, *arguments, **environment)


def test_generate_gives_the_same_answer_with_and_without_a_draft(model_folder):
    answers = [
        json.loads(generate(model_folder, "--dtype", "float32", "--json", *options).stdout)
        for options in (["--draft", "none"], [], ["--draft", model_folder, "--num-speculative-tokens", 3])
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
    assert [answer["draft_version"] for answer in answers] == ["none", "untrained", model_folder.name]
    assert answers[2]["acceptance_rate"] > 0.4  # the target as its own draft, and suffixes that are not always right
    assert answers[0]["acceptance_rate"] is None


def test_generate_prints_only_the_text_on_standard_output(model_folder):
    result = generate(model_folder, "--raw", "--seed", 3, "--temperature", 0.7, run=real_livedraft)
    assert result.returncode == 0
    again = generate(model_folder, "--raw", "--seed", 3, "--temperature", 0.7, "--draft", "none", "--dtype", "float32")
    assert (
        generate(model_folder, "--raw", "--seed", 3, "--temperature", 0.7, "--dtype", "float32").stdout == again.stdout
    )
    assert "thread" in result.stderr
    assert "Timing the model's passes" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tokens", "0"], ["max_tokens"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--draft", "nothing-there"], ["no draft 'nothing-there'"]),
        (["--num-speculative-tokens", "99"], ["num_speculative_tokens"]),
        (["--dtype", "int3"], ["dtype"]),
        (["--max-tokens", "9999"], ["limit of 512"]),
    ],
)
def test_wrong_options_are_one_sentence(model_folder, options, words):
    assert_one_sentence(generate(model_folder, *options), *words)


def test_wrong_path_and_missing_model_are_one_sentence(tmp_path):
    assert_one_sentence(generate(tmp_path / "nowhere", run=real_livedraft), "There is no model at")
    assert_one_sentence(generate("smollm2-135m", LIVEDRAFT_MODELS=str(tmp_path)), "livedraft pull smollm2-135m")
    assert_one_sentence(livedraft("pull", "gpt-17"), "no model named 'gpt-17'")


def test_damaged_model_file_is_one_sentence(tmp_path):
    folder = write_text_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_one_sentence(generate(folder), "damaged")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 40)
    assert_one_sentence(generate(gguf), "damaged")


def test_tokenizers_that_do_not_match_are_one_sentence(model_folder, tmp_path):
    from dataclasses import replace

    small = replace(TEXT_CONFIG, vocabulary_size=100, eos_token_ids=(7,))
    write_hf_folder(tmp_path / "small", small, random_tensors(small))
    byte_tokenizer().save_pretrained(tmp_path / "small")
    assert_one_sentence(generate(tmp_path / "small"), "258 tokens and the model 100", "do not belong together")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<other>"])
    bigger = replace(TEXT_CONFIG, vocabulary_size=259)
    write_hf_folder(tmp_path / "other", bigger, random_tensors(bigger))
    tokenizer.save_pretrained(tmp_path / "other")
    assert_one_sentence(generate(model_folder, "--draft", tmp_path / "other"), "tokenizer", "not the target's")


def test_a_folder_without_tokenizer_is_one_sentence(tmp_path):
    write_hf_folder(tmp_path, TEXT_CONFIG, random_tensors(TEXT_CONFIG))
    assert_one_sentence(generate(tmp_path), "no tokenizer")


def test_no_disk_space_is_one_sentence(model_folder, tmp_path):
    """A state folder on a device that is always full, and a models folder that cannot be made."""
    assert_one_sentence(generate(model_folder, "--state", "/dev/full/state"), "state folder", "--state")
    file = tmp_path / "file"
    file.write_text("")
    assert_one_sentence(livedraft("pull", LIVEDRAFT_MODELS=str(file / "models")), "could not be stored")


def test_prompt_files_are_checked(model_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    run = ("bench", "speed", "--model", model_folder, "--prompts", path)
    assert_one_sentence(livedraft(*run), "cannot be read")
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\nnot json\n')
    assert_one_sentence(livedraft(*run), "Line 2")
    path.write_text("\n")
    assert_one_sentence(livedraft(*run), "no prompt")


def test_bench_speed_prints_one_object(model_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"prompt {n}"]}) + "\n" for n in range(12)))
    result = livedraft(
        "bench", "speed", "--model", model_folder, "--prompts", path, "--limit", 10, "--max-tokens", 8, "--json",
        "--dtype", "float32",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["draft_version"] == "untrained"
    assert figures["compared"] == figures["same_output"] == figures["num_prompts"] == 10
    assert len(figures["V"]) == 9
    assert figures["V"][0] == 1.0
    low, high = figures["share_of_formula_interval"]
    assert 0 < low <= figures["share_of_formula"] <= high
    for name in ("plain", "speculative", "transformers"):
        assert figures[f"{name}_tokens_per_second"] > 0
    for other in ("plain", "draft_alone"):
        for kind in ("whole_answer", "decoding_only"):
            assert figures["as_served"][f"over_{other}"][kind]["ratio"] > 0
    plain = livedraft(
        *(
            "bench",
            "speed",
            "--model",
            model_folder,
            "--prompts",
            path,
            "--limit",
            2,
            "--max-tokens",
            4,
            "--json",
            "--draft",
            "none",
        )
    )
    assert json.loads(plain.stdout)["speculative_tokens_per_second"] is None


def test_help_needs_no_torch():
    code = "import sys; from livedraft.cli import main; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "demo" in real_livedraft("--help").stdout
