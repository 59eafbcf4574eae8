"""`bench serve --compare-learning` over the command line, on a tiny model: all its figures are there; they say nothing."""

import json

import pytest

from tests.e2e.in_process import livedraft

KEYS = {
    "itl_p50_ratio", "itl_p99_ratio", "train_tokens_per_served_token", "train_flops_per_serve_flops", "versions_promoted",
    "idle_core_share", "capacity_requests_per_second",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_all_figures_are_there(model_folder):
    result = livedraft(
        "bench", "serve", "--compare-learning", "--model", model_folder, "--dtype", "float32", "--windows", 2,
        "--window-seconds", 4, "--max-tokens", 24, "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures.keys() >= KEYS
    assert figures["itl_p50_ratio"] > 0
    assert figures["train_tokens_per_served_token"] > 0
