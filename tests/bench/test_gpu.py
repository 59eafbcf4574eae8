"""The one command for GPUs, to its end where there is none."""

import json

import pytest
import torch

from livedraft.bench import gpu
from tests.tiny import TINY, static_decoder

pytestmark = pytest.mark.timeout(300)


def run(model_folder, monkeypatch, capsys, as_json):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "_TRAINER_PATIENCE_SECONDS", 1.0)
    small = gpu.Sizes(num_prompts=2, batch=2, max_tokens=12, num_rounds=1, num_windows=1)
    monkeypatch.setattr(gpu, "ON_CPU", small)
    gpu.run(draft="untrained", model=str(model_folder), threads=1, as_json=as_json)
    return capsys.readouterr()


def test_without_a_gpu_it_runs_to_its_end_and_judges_nothing(model_folder, monkeypatch, capsys):
    printed = run(model_folder, monkeypatch, capsys, as_json=True)
    result = json.loads(printed.out)
    assert (result["device"], result["reduced"], result["attention"]) == ("cpu", True, "sdpa")
    assert "no GPU here" in printed.err
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == 7
    assert all(row["meets"] is None for row in rows.values())
    large = rows.pop("share of the memory limit, 7B shape, bf16, batch 1")
    assert (large["value"], large["note"]) == (None, "skipped: no GPU")
    assert all(row["value"] > 0 and "not judged" in row["note"] for row in rows.values() if "stall" not in row["name"])
    assert rows["greedy float32 answers equal without graphs"]["value"] == 1.0
    swaps = rows["longest stall by a swap, ms"]
    assert swaps["value"] is not None
    assert swaps["note"].startswith("6 swaps")


@pytest.mark.long
def test_the_table_comes_last(model_folder, monkeypatch, capsys):
    lines = run(model_folder, monkeypatch, capsys, as_json=False).out.splitlines()
    assert "livedraft bench gpu: cpu" in " ".join(lines[:3])
    assert lines[-1].startswith("└")


def test_random_weights_have_a_models_shape():
    model = gpu.random_model(TINY, torch.float32, torch.device("cpu"))
    step = static_decoder(model)
    assert step.forward([1, 2], [0, 1], [0, 0], [0, 1]).logits_RV.isfinite().all()
