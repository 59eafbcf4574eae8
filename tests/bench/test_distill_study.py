"""`bench distill` over recorded responses of a tiny model, to its end and again; and that the recipes are whole."""

import json
from pathlib import Path

import pytest

from livedraft.bench import distill as study
from livedraft.learning.distill import read_metrics
from livedraft.settings import load_recipe
from tests.e2e.in_process import livedraft


@pytest.fixture
def traces(model_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"question {n}"]}) + "\n" for n in range(40)))
    path = tmp_path / "recorded.st"
    recorded = livedraft(
        "bench", "replay", "--prompts", prompts, "--limit", 40, "--concurrency", 8, "--max-tokens", 12, "--arm", "static:INIT",
        "--model", model_folder, "--dtype", "float32", "--save-traces", path, "--json",
    )  # fmt: skip
    assert recorded.returncode == 0, recorded.stderr
    return path


def test_the_study_compares_at_equal_work(model_folder, traces, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ARMS", (("top", 0.4, True), ("random", 0.4, True), ("top", 0.4, False)))
    run = (
        "bench", "distill", "--traces", traces, "--sampled-traces", traces, "--limit", 40, "--seeds", "0,1", "--epochs", 2,
        "--layers", 1, "--losses", "--out", tmp_path / "study", "--model", model_folder, "--threads", 1,
    )  # fmt: skip
    first = livedraft(*run, "--json")
    assert first.returncode == 0, first.stderr
    figures = json.loads(first.stdout)
    selection = figures["selection"]
    assert set(selection) == {"distillspec", "top 0.4", "random 0.4", "top 0.4, full rate"}
    assert selection["top 0.4"]["alpha"] != selection["top 0.4, full rate"]["alpha"]
    assert set(selection["top 0.4"]) == {"alpha", "equal steps", "equal FLOPs", "equal selected tokens"}
    assert set(selection["random 0.4"]) == {"alpha", "equal steps", "equal FLOPs"}
    difference = selection["top 0.4"]["alpha"]["mean"] - selection["distillspec"]["alpha"]["mean"]
    assert selection["top 0.4"]["equal steps"]["mean"] == pytest.approx(difference, abs=2e-4)
    assert set(figures["losses"]["greedy responses"]) == {
        "forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha", "hybrid", "cross_entropy"
    }  # fmt: skip
    # Everything is kept: a second call only reads and measures.
    assert figures.pop("run")["data"] == "recorded"
    assert {
        name: value for name, value in json.loads(livedraft(*run, "--json").stdout).items() if name != "run"
    } == figures
    assert "random 0.4" in livedraft(*run).stdout
    other = livedraft(*(3 if argument == 2 else argument for argument in run))
    assert other.returncode == 1
    assert "holds a study with epochs = 2" in other.stderr
    # DistillSpec trained on until its work is that of an AdaSPEC run and its reference, to within an epoch.
    rows = {name: read_metrics(tmp_path / "study" / f"seed-0-{name}") for name in ("distillspec", "top-0.4")}
    steps = len(rows["distillspec"]) // 6 * 2
    work = rows["distillspec"][steps - 1]["flops"] + rows["top-0.4"][steps - 1]["flops"]
    assert rows["distillspec"][-1]["flops"] > work


def test_seeds_that_are_none_are_refused(traces):
    result = livedraft("bench", "distill", "--traces", traces, "--seeds", "one")
    assert result.returncode == 1
    assert "--seeds" in result.stderr


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_whole(recipe):
    run, config = load_recipe(recipe, {})
    assert run.out == f"distilled/{recipe.stem}"
    assert f"recipes/{recipe.name}" in recipe.read_text()
    for name in (run.target, run.draft):
        assert f"livedraft pull {name}" in recipe.read_text()
    assert run.prompts.startswith("hub:")
    assert config.method in ("adaspec", "distillspec")


def test_there_are_recipes_for_every_pair_of_the_papers():
    tasks = {"gsm8k", "alpaca", "mbpp", "cnn-dm", "xsum"}
    assert {path.stem for path in RECIPES} == {f"{m}-{t}" for m in ("pythia", "codegen") for t in tasks} | {
        "vicuna-gsm8k"
    }
