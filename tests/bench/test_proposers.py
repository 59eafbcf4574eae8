"""`bench proposers` over a tiny model: streams by file, topic and turn, all four ways to answer, the same output."""

import json

import pytest

from tests.e2e.in_process import livedraft


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"turns": [f"say {n} again", "and once more"][: 1 + n % 2], "topic": ("odd", "even")[n % 2]} for n in range(6)
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model_folder, prompts, *options):
    return livedraft(
        "bench", "proposers", "--prompts", prompts, "--model", model_folder, "--dtype", "float32", "--threads", 1,
        "--max-tokens", 24, *options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ((), {"talk": 6}),
        (("--topic", "odd", "--topic", "even"), {"odd": 3, "even": 3}),
        (("--topic", "odd"), {"odd": 3}),
        (("--topic", "odd", "--topic", "even", "--second-turns"), {"odd": 3, "second turns": 3}),
        (("--limit", 2), {"talk": 2}),
    ],
)
def test_streams(model_folder, prompts, options, streams):
    result = run(model_folder, prompts, "--json", *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["streams"]
    assert {name: one["num_prompts"] for name, one in found.items()} == streams
    for figures in found.values():
        assert figures["same_output"] == figures["compared"] == figures["num_prompts"]
        for name in ("suffix", "draft", "suffix_and_draft"):
            assert figures[name]["ratio"] >= figures[name]["lower_bound"] > 0
        assert figures["suffix"]["block_efficiency"] >= 1.0
        assert figures["suffix_and_draft_over_suffix"]["ratio"] > 0


def test_a_table_and_what_is_refused(model_folder, prompts):
    assert "talk" in run(model_folder, prompts).stdout
    assert "topics asked for" in run(model_folder, prompts, "--topic", "none").stderr
    assert "name one with --draft" in run(model_folder, prompts, "--draft", "none").stderr
