"""`livedraft distill` from a prompt file to a draft that serves: kills, several processes, families, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers

from livedraft.learning.distill import read_metrics
from livedraft.learning.store import read_recorded
from tests.assisted import acceptance_rate
from tests.e2e.in_process import livedraft
from tests.hf_folder import byte_tokenizer

RECIPE = """
[run]
draft_layers = 1
concurrency = 4
dtype = "float32"
threads = 1

[distill]
epochs = 2
batch_size = 4
checkpoint_steps = 2
max_tokens = 16
validation_share = 0.3
learning_rate = 1e-2
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [{"turns": [f"question {n} of many"], "response": f"answer {n}"} for n in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def distill(files, target, *options, out="out"):
    result = livedraft(
        "distill", "--recipe", files / "recipe.toml", "--prompts", files / "prompts.jsonl", "--target", target,
        "--out", files / out, "--json", *options,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_both_methods_and_a_draft_that_serves(model_folder, files):
    figures = distill(files, model_folder)
    assert figures["num_train"] + figures["num_validation"] == 24
    for name in ("initial", "distillspec", "adaspec"):
        alpha = figures[f"{name}_alpha"]
        assert 0 <= alpha["low"] <= alpha["mean"] <= alpha["high"] <= 1
    assert figures["distillspec_alpha"]["mean"] > figures["initial_alpha"]["mean"]
    difference = figures["adaspec_alpha"]["mean"] - figures["distillspec_alpha"]["mean"]
    assert figures["adaspec_minus_distillspec"]["mean"] == pytest.approx(difference, abs=2e-4)
    ours, both = figures["adaspec_training"]["flops"], figures["adaspec_training"]["flops_with_reference"]
    assert both == ours + figures["distillspec_training"]["flops"] > ours > figures["distillspec_training"]["flops"]
    assert figures["run"]["seeds"] == [0]
    assert figures["run"]["data"] == "prompts"
    assert figures["run"]["settings"] == {
        "draft_layers": 1, "epochs": 2, "batch_size": 4, "max_tokens": 16, "validation_share": 0.3, "learning_rate": 1e-2
    }  # fmt: skip
    assert list((files / "out" / "tensorboard" / "adaspec").glob("events*"))
    card = (files / "out" / "adaspec" / "README.md").read_text()
    assert "target fingerprint" in card
    assert '"select_fraction": 0.4' in card
    steps = read_metrics(files / "out" / "adaspec")
    assert all(row["num_selected"] < 0.5 * row["num_positions"] for row in steps)
    # It serves, alone and as the start of a fresh state's learning.
    draft = files / "out" / "distillspec"
    for state in ((), ("--state", files / "state")):
        served = livedraft(
            "generate", "question 3 of many", "--model", model_folder, "--draft", draft, "--dtype", "float32", "--json",
            "--num-speculative-tokens", 2, "--max-tokens", 16, *state,
        )  # fmt: skip
        assert json.loads(served.stdout)["acceptance_rate"] > 0, served.stderr
    # Nothing is trained twice, and the figures stay.
    again = distill(files, model_folder)
    assert again["adaspec_alpha"] == figures["adaspec_alpha"]


def test_an_exported_draft_is_accepted_as_often_elsewhere(model_folder, files):
    """The folder for transformers: as often inside transformers' assisted generation, by its own count, and taken back in as a
    whole model of its own."""
    distill(files, model_folder, "--method", "distillspec", "--epochs", 5, "--draft-layers", 2, "--max-tokens", 48)
    draft = files / "out" / "distillspec"
    done = livedraft("drafts", "export", draft, files / "hf", "--model", model_folder, "--json")
    assert done.returncode == 0, done.stderr
    card = (files / "hf" / "README.md").read_text()
    assert "kept back" in card
    assert json.loads(done.stdout)["absent_mass"] is None  # it knows all of the byte tokens
    assert "probability of all others together: none" in card
    manifest = json.loads((draft / "manifest.json").read_text())
    for words in (manifest["data_sha256"], f"torch {torch.__version__}", f"transformers {transformers.__version__}"):
        assert words in card
        assert words in (draft / "README.md").read_text()
    rates = []
    for source in (draft, files / "hf"):
        result = livedraft(
            "bench", "acceptance", "--prompts", files / "prompts.jsonl", "--model", model_folder, "--draft", source,
            "--dtype", "float32", "--threads", 1, "--max-tokens", 48, "--temperature", 0, "--limit", 12, "--json",
        )  # fmt: skip
        rates.append(json.loads(result.stdout)["temperature_0"]["acceptance_rate"]["mean"])
    assert rates[0] == pytest.approx(rates[1], abs=0.02)
    assert 0.1 < rates[0] < 0.9  # or agreeing means little
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(files / "hf", dtype=torch.float32)
    target = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "hf")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["turns"][0]}], add_generation_prompt=True, return_dict=False
        )
        for line in (files / "prompts.jsonl").read_text().splitlines()[:12]
    ]
    theirs = acceptance_rate(target, hf_model, prompts, k=4, max_tokens=48, eos=257)
    assert theirs == pytest.approx(rates[0], abs=0.02)
    ids = torch.tensor([[5, 6, 7, 8]])
    answers = [
        target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=assistant, pad_token_id=256)
        for assistant in (None, hf_model)
    ]
    assert torch.equal(*answers)
    missing = livedraft(
        "drafts", "export", files / "nowhere", files / "x", "--model", model_folder, "--state", files / "s"
    )
    assert missing.returncode == 1


def test_other_settings_in_the_same_folder_are_refused(model_folder, files):
    distill(files, model_folder, "--method", "distillspec", "--epochs", 1)
    run = ("distill", "--recipe", files / "recipe.toml", "--prompts", files / "prompts.jsonl", "--target", model_folder)
    for options, words in (
        (("--out", files / "out"), "method = 'distillspec', this one has 'adaspec'; give another --out"),
        (("--out", files / "recipe.toml" / "x"), "cannot be written"),
        (("--out", files / "other", "--traces", files / "x.st"), "either prompts"),
        (("--out", files / "other", "--loss", "mse"), "distill.loss"),
        (("--out", files / "other", "--reference", files), "There is no draft in"),
        (("--out", files / "other", "--limit", 2), "kept back"),
    ):
        result = livedraft(*run, *options)
        assert result.returncode == 1, result.stdout
        assert words in result.stderr, result.stderr
    typo = files / "typo.toml"
    typo.write_text("[distill]\nselect_fracton = 0.2\n")
    result = livedraft("distill", "--recipe", typo, "--prompts", files / "prompts.jsonl")
    assert "select_fraction" in result.stderr


@pytest.mark.parametrize("options", [
    ("--source", "student", "--temperature", "1"),
    ("--source", "mix", "--mix-level", "token"),
    ("--source", "mix", "--teacher", "full", "--loss", "jsd"),
    ("--responses", "given", "--loss", "cross_entropy"),
], ids=" ".join)  # fmt: skip
def test_whose_texts_and_which_loss(model_folder, files, options):
    """Each combination runs to its end and learns from texts of its own."""
    figures = distill(files, model_folder, "--method", "distillspec", *options)
    losses = [row["loss"] for row in read_metrics(files / "out" / "distillspec")]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert figures["adaspec_alpha"] is None
    assert len(list((files / "out" / "distillspec").glob("texts-*.st"))) == (2 if "--source" in options else 0)


def test_responses_are_the_same_when_the_draft_helps_to_write_them(model_folder, files):
    """A draft that knows something speculates while the target answers; what the target says does not change."""
    distill(files, model_folder, "--method", "distillspec", "--epochs", 8)
    draft = files / "out" / "distillspec"
    distill(files, model_folder, "--method", "distillspec", "--draft", draft, out="again")
    plain, helped = (
        [trace for part in sorted((files / out / "responses").glob("*.st")) for trace in read_recorded(part)]
        for out in ("out", "again")
    )
    assert [trace.output_token_ids for trace in helped] == [trace.output_token_ids for trace in plain]
    assert {trace.draft_version for trace in helped} == {str(draft)}


def test_a_prompt_without_the_response_it_should_have_is_named(model_folder, files):
    with (files / "prompts.jsonl").open("a") as file:
        file.write('{"turns": ["no answer"]}\n')
    result = livedraft(
        "distill", "--recipe", files / "recipe.toml", "--prompts", files / "prompts.jsonl", "--target", model_folder,
        "--out", files / "out", "--responses", "given",
    )  # fmt: skip
    assert result.returncode == 1
    assert "Prompt 25 has no `response`" in result.stderr


def family_folder(folder, config, seed):
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def neox(vocab_size=258, **fields):
    return transformers.GPTNeoXConfig(
        vocab_size=vocab_size, num_attention_heads=2, intermediate_size=32, max_position_embeddings=256, eos_token_id=257,
        **fields,
    )  # fmt: skip


def codegen(vocab_size):
    return transformers.CodeGenConfig(
        vocab_size=vocab_size, n_positions=256, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, eos_token_id=257
    )


def phi(vocab_size):
    return transformers.PhiConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, eos_token_id=257,
    )  # fmt: skip


def llama(num_layers):
    return transformers.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=4,
        max_position_embeddings=256, eos_token_id=257,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (neox(hidden_size=32, num_hidden_layers=2), neox(hidden_size=16, num_hidden_layers=1)),
        (phi(272), codegen(264)),  # padded differently, as CodeGen and Phi-2 are
        (llama(3), llama(1)),
    ],
    ids=["pythia", "codegen and phi", "llama"],
)
def test_pairs_of_the_papers(files, target, draft):
    target = family_folder(files / "target", target, 0)
    draft = family_folder(files / "draft", draft, 1)
    figures = distill(files, target, "--draft", draft, "--method", "adaspec")
    assert figures["distillspec_alpha"]["mean"] > figures["initial_alpha"]["mean"]
    served = livedraft(
        "generate", "question 3", "--raw", "--model", target, "--draft", files / "out" / "adaspec", "--dtype", "float32",
        "--num-speculative-tokens", 2, "--json",
    )  # fmt: skip
    assert json.loads(served.stdout)["acceptance_rate"] is not None, served.stderr


def test_another_tokenizer_is_refused_with_the_reason(model_folder, files):
    other = family_folder(files / "draft", neox(hidden_size=16, num_hidden_layers=1, vocab_size=260), 1)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(other)
    result = livedraft(
        "distill",
        "--prompts",
        files / "prompts.jsonl",
        "--target",
        model_folder,
        "--draft",
        other,
        "--out",
        files / "out",
    )
    assert result.returncode == 1
    assert "not the target's" in result.stderr


def test_a_target_may_be_fine_tuned_first(model_folder, files):
    figures = distill(
        files,
        model_folder,
        "--finetune-target",
        files / "prompts.jsonl",
        "--responses",
        "given",
        "--method",
        "distillspec",
        "--finetune-epochs",
        2,
        "--finetune-learning-rate",
        1e-3,
    )
    assert (files / "out" / "target" / "model.safetensors").exists()
    assert figures["distillspec_alpha"]["mean"] > figures["initial_alpha"]["mean"]
    kept = json.loads((files / "out" / "run.json").read_text())
    assert (kept["finetune_epochs"], kept["finetune_learning_rate"]) == (2, 1e-3)


def test_a_reference_distilled_before_does_as_well_as_one_made_now(model_folder, files):
    """Not a step is trained for it again, and AdaSPEC comes out the same."""
    expected = distill(files, model_folder)
    figures = distill(files, model_folder, "--reference", files / "out" / "distillspec", out="again")
    assert not (files / "again" / "distillspec").exists()
    assert figures["distillspec_alpha"] == expected["distillspec_alpha"]
    assert figures["adaspec_alpha"] == expected["adaspec_alpha"]
    # On some CPUs a training run alone differs in the sixth digit from one time to the next: sums by where memory lies.
    expected_losses = pytest.approx(losses_of(files / "out" / "adaspec"), rel=1e-5)
    assert losses_of(files / "again" / "adaspec") == expected_losses
    assert "distillspec_training" not in figures
    # Another reference selects otherwise.
    other = distill(files, model_folder, "--reference", files / "out" / "adaspec", out="other")
    assert losses_of(files / "other" / "adaspec") != expected_losses
    assert other["distillspec_alpha"] == expected["adaspec_alpha"]


def start(files, target, *prefix):
    command = [
        sys.executable, *(prefix or ("-m", "livedraft")), "distill", "--recipe", str(files / "recipe.toml"), "--prompts",
        str(files / "prompts.jsonl"), "--target", str(target), "--out", str(files / "killed"), "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses_of(folder):
    return [row["loss"] for row in read_metrics(folder)]


def losses(folder):
    return [loss for name in ("distillspec", "adaspec") for loss in losses_of(folder / name)]


def test_kill_9_and_on(model_folder, files):
    expected = distill(files, model_folder)
    process = start(files, model_folder)
    wanted = files / "killed" / "adaspec" / "checkpoint.safetensors"
    deadline = time.monotonic() + 60
    while not wanted.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (files / "killed" / "result.json").exists()
    figures = distill(files, model_folder, out="killed")
    assert losses(files / "killed") == pytest.approx(losses(files / "out"), rel=1e-3)
    assert figures["adaspec_alpha"]["mean"] == pytest.approx(expected["adaspec_alpha"]["mean"], abs=2e-3)


def test_two_processes_train_as_one(model_folder, files):
    distill(files, model_folder)
    process = start(files, model_folder, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "livedraft")
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    spec = read_metrics(files / "killed" / "distillspec")
    one = read_metrics(files / "out" / "distillspec")
    assert [row["loss"] for row in spec] == pytest.approx([row["loss"] for row in one], rel=1e-3)
    assert json.loads(output.strip().splitlines()[-1])["distillspec_alpha"]["mean"] > 0
