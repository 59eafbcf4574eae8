"""`bench acceptance`: the counts of a hand-made trace, and that the whole bench agrees with the engine's own statistics."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from livedraft.bench.acceptance import _by_position, _counts, _frequent_tokens, _live_figures, _ratio, _rounds
from tests.e2e.in_process import livedraft


def trace(positions, accepted, off_path, num_outputs, rounds):
    return SimpleNamespace(
        drafted_position_P=np.array(positions),
        drafted_accepted_P=np.array(accepted, dtype=bool),
        drafted_off_path_P=np.array(off_path, dtype=bool),
        drafted_token_id_P=np.array(positions),
        output_token_ids=[0] * num_outputs,
        round_number_T=np.array(rounds),
    )


def by_hand():
    """Five rounds: the prompt's own token; three drafted and two accepted; three drafted, none accepted; one drafted and
    rejected, which the next round's first position follows directly; two drafted, both accepted."""
    return trace(
        positions=[1, 2, 3, 4, 5, 6, 5, 6, 7],
        accepted=[1, 1, 0, 0, 0, 0, 0, 1, 1],
        off_path=[0, 0, 0, 0, 1, 1, 0, 0, 0],
        num_outputs=9,
        rounds=[0, 1, 1, 1, 2, 3, 4, 4, 4],
    )


def test_drafts_are_told_apart():
    found = [one.tolist() for one in _rounds(by_hand())]
    assert found == [[True, True, False], [False, False, False], [False], [True, True]]
    nothing = trace([], [], [], 2, [0, 1])
    assert _rounds(nothing) == []
    assert _counts(nothing).drafted == 0


def test_each_definition_on_the_trace_by_hand():
    figures = _live_figures([_counts(by_hand())])
    assert figures["acceptance_rate"]["mean"] == pytest.approx(4 / 9, abs=1e-4)
    assert figures["reached_rate"]["mean"] == pytest.approx(4 / 7, abs=1e-4)
    assert figures["mean_acceptance_length"]["mean"] == pytest.approx(1 + 4 / 4, abs=1e-4)
    assert figures["block_efficiency"]["mean"] == pytest.approx(9 / 5, abs=1e-4)
    by_position = _by_position([by_hand()])
    assert [one["mean"] for one in by_position] == [0.5, 0.6667, 0.0]
    assert [(one["low"], one["high"]) for one in by_position] == [
        (0.5, 0.5),
        (0.6667, 0.6667),
        (0.0, 0.0),
    ]  # one request
    assert _live_figures([_counts(trace([], [], [], 2, [0, 1]))])["acceptance_rate"] is None


def test_ratios_are_of_sums_and_their_intervals_over_requests():
    generator = np.random.default_rng(0)
    lower = generator.integers(20, 60, 200).astype(float)
    upper = generator.binomial(lower.astype(int), 0.4).astype(float)
    figure = _ratio(upper, lower)
    assert figure["mean"] == pytest.approx(upper.sum() / lower.sum(), abs=1e-4)
    assert figure["low"] < 0.4 < figure["high"]
    assert figure["high"] - figure["low"] == pytest.approx(2 * 1.96 * (0.24 / lower.sum()) ** 0.5, rel=0.25)


def test_each_positions_interval_is_over_requests():
    """Every draft of the odd requests is accepted, none of the even ones; the third position is drafted in one alone."""
    good = trace([1, 2, 3], [1, 1, 1], [0, 0, 0], 4, [0, 1, 1, 1])
    bad = trace([1, 2], [0, 0], [0, 1], 2, [0, 1])
    first, _, third = _by_position([good] + [bad, trace([1, 2], [1, 1], [0, 0], 3, [0, 1, 1])] * 30)
    assert first["mean"] == pytest.approx(31 / 61, abs=1e-4)
    assert first["high"] - first["low"] == pytest.approx(2 * 1.96 * (0.25 / 61) ** 0.5, rel=0.25)
    assert third == {"mean": 1.0, "low": 1.0, "high": 1.0}  # samples without that request say nothing of it


def test_precision_and_recall_token_by_token():
    examples = [SimpleNamespace(output_token_ids=[7, 7, 7, 7]), SimpleNamespace(output_token_ids=[8, 8, 9])]
    guesses = {"draft": [np.array([7, 7, 8, 8]), np.array([8, 7, 8])]}
    found = _frequent_tokens(examples, guesses)
    assert [(row["id"], row["num_occurrences"], row["draft"]) for row in found["tokens"]] == [
        (7, 4, {"precision": 0.6667, "recall": 0.5}),
        (8, 2, {"precision": 0.25, "recall": 0.5}),
        (9, 1, {"precision": None, "recall": 0.0}),
    ]
    assert found["draft"]["precision"] == pytest.approx((0.6667 + 0.25) / 2, abs=1e-4)
    assert found["draft"]["recall"] == pytest.approx(1 / 3, abs=1e-4)


def test_the_bench_says_what_serving_counted(model_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"number {n}"], "topic": ("odd", "even")[n % 2]} for n in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = (
        "bench", "acceptance", "--prompts", prompts, "--model", model_folder, "--dtype", "float32", "--max-tokens", 16,
        "--draft", model_folder, "--before", "untrained", "--threads", 1,
    )  # fmt: skip
    first, again = (livedraft(*run, "--json") for _ in range(2))
    assert first.returncode == 0, first.stderr
    figures = json.loads(first.stdout)
    assert figures == json.loads(again.stdout)  # the draws follow from the seed
    assert json.loads(livedraft(*run, "--seed", 1, "--json").stdout)["temperature_1"] != figures["temperature_1"]
    for temperature in ("temperature_0", "temperature_1"):
        found = figures[temperature]
        # The target as its own draft: everything is accepted, up to what the top 64 tokens leave out.
        assert found["argmax_match"]["mean"] == 1.0
        assert found["alpha"]["mean"] > 0.9
        assert found["reached_rate"]["mean"] > 0.95
        assert found["by_position"][0]["mean"] > 0.95
        assert all(one["low"] <= one["mean"] <= one["high"] for one in found["by_position"])
        assert found["mean_acceptance_length"]["mean"] > 3.5
        assert found["before"]["alpha"]["mean"] < found["alpha"]["mean"]
        assert set(found["by_topic"]) == {"odd", "even"}
        assert found["by_topic"]["odd"]["num_prompts"] == 4
        tokens = found["frequent_tokens"]
        assert tokens["before"]["recall"] <= tokens["draft"]["recall"] <= 1.0
        assert len(tokens["tokens"]) == tokens["num_tokens"]
        assert tokens["tokens"][0].keys() == {"id", "num_occurrences", "draft", "before", "text"}
    assert figures["temperature_0"]["frequent_tokens"]["draft"] == {"precision": 1.0, "recall": 1.0}
    shown = livedraft(*run)
    for name in figures["definitions"]:
        assert name in shown.stdout
