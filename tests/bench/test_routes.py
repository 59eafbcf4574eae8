"""`bench routes` from prompts to figures on a tiny model: several drafts against one at the same number of steps."""

import json

import pytest

from tests.e2e.in_process import livedraft

SUBJECTS = {
    "adding": "What is {n} plus {n}, and plus one more?",
    "rhyme": "Ein Reim auf das Wort Nummer {n}, bitte sehr!",
}
CONFIG = """
[routing]
by = ["language", "topic"]
num_topics = 2
min_requests = 8

[learning]
learning_rate = 3e-3
warmup_steps = 0
replay_spacing = 0.0
"""


@pytest.fixture
def prompts(tmp_path):
    paths = []
    for name, text in SUBJECTS.items():
        path = tmp_path / f"{name}.jsonl"
        rows = [{"messages": [{"role": "user", "content": text.format(n=n)}]} for n in range(30)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path)
    return paths


def run(model_folder, prompts, folder, *options):
    config = folder / "livedraft.toml"
    config.write_text(CONFIG)
    files = [argument for path in prompts for argument in ("--prompts", path)]
    return livedraft(
        "bench", "routes", *files, "--model", model_folder, "--dtype", "float32", "--threads", 1, "--max-tokens", 8,
        "--config", config, *options,
    )  # fmt: skip


def test_from_prompts_to_figures(model_folder, prompts, tmp_path):
    recorded = tmp_path / "recorded.st"
    result = run(model_folder, prompts, tmp_path, "--json", "--save-traces", recorded)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    for way in ("routed", "shared", "oracle", "stream_oracle", "random", "classifier"):
        mean = figures[f"{way}_alpha"]
        assert 0.0 < mean["low"] <= mean["mean"] <= mean["high"] < 1.0
    assert figures["oracle_alpha"]["mean"] >= figures["stream_oracle_alpha"]["mean"]
    assert figures["oracle_alpha"]["mean"] >= figures["routed_alpha"]["mean"]
    below = figures["oracle_alpha"]["mean"] - figures["routed_alpha"]["mean"]
    assert figures["below_oracle"]["mean"] == pytest.approx(below, abs=2e-4)
    assert figures["labels"]["rhyme"] == {"language-de": 30}
    assert sum(figures["labels"]["adding"].values()) == 30
    assert "language-de" not in figures["labels"]["adding"]
    assert "language-de" in figures["routes"]
    assert set(figures["by_stream"]) == {"adding", "rhyme"}
    assert sum(row["requests"] for row in figures["by_stream"].values()) >= 20
    assert figures["are_updates_equal"]
    assert 0 < figures["updates"]["routed"] <= figures["updates"]["shared"] + len(figures["routes"])
    assert set(figures["versions_promoted"]) == {"shared", "routed"}
    assert figures["router_p99_ms"] >= figures["router_ms"] / 2 > 0
    # From the recording, as a table.
    table = run(model_folder, prompts, tmp_path, "--from-traces", recorded)
    assert table.returncode == 0, table.stderr
    assert "routes opened:" in table.stdout and "language-de" in table.stdout


def test_too_few_prompts_are_refused(model_folder, prompts, tmp_path):
    result = run(model_folder, prompts[:1], tmp_path, "--limit", 20)
    assert result.returncode == 1
    assert "a comparison needs at least" in result.stderr
