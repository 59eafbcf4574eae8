"""`bench proposers` over a tiny model: streams by file, topic and turn, all four ways to answer, the same output."""

import json

import pytest

from livedraft.bench.contender import Contender
from livedraft.bench.proposers import _streams
from livedraft.llm import LLM
from livedraft.records import SamplingParams
from tests.e2e.in_process import livedraft

WAYS = ("suffix", "suffix_with_traffic", "draft", "suffix_and_draft", "suffix_with_traffic_and_draft")


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
        for name in WAYS:
            for kind in ("whole_answer", "decoding_only"):
                assert figures[name][kind]["ratio"] >= figures[name][kind]["lower_bound"] > 0
        assert figures["suffix"]["block_efficiency"] >= 1.0
        assert figures["suffix_and_draft_over_suffix"]["whole_answer"]["ratio"] > 0
        assert figures["suffix_with_traffic_and_draft_over_draft"]["decoding_only"]["ratio"] > 0


def test_rows_come_from_the_whole_of_a_stream(prompts):
    rows = _streams([str(prompts)], 2, (), False)["talk"]
    assert [row.messages[0]["content"] for row in rows] == ["say 0 again", "say 3 again"]


def test_with_traffic_each_contender_finds_its_own_earlier_answers_and_nobody_elses(model_folder, monkeypatch):
    """An earlier answer that says the same is found by the contender that gave it; warming up leaves nothing."""
    monkeypatch.setattr("livedraft.engine.engine.is_held_out", lambda key: False)
    with LLM(str(model_folder), draft="none", dtype="float32", num_threads=1) as llm:
        sampling = SamplingParams(max_tokens=24)
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "say it"}])

        def passes(contender):
            before = contender.stats.num_target_passes
            contender(prompt)
            return contender.stats.num_target_passes - before

        alone, keeps, other = (
            Contender(llm, None, sampling, uses_suffixes=True, keeps_traffic=kept) for kept in (False, True, True)
        )
        first = passes(keeps)
        assert passes(keeps) < first / 2
        assert passes(other) == passes(alone) == first
        keeps.forget_counts()
        assert keeps(prompt) == other(prompt)
        assert not llm.engine.traffic


def test_a_table_and_what_is_refused(model_folder, prompts):
    assert "talk" in run(model_folder, prompts).stdout
    assert "topics asked for" in run(model_folder, prompts, "--topic", "none").stderr
    assert "name one with --draft" in run(model_folder, prompts, "--draft", "none").stderr
