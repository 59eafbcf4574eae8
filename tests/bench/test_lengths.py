"""What `bench lengths` computes, by hand."""

import json

import numpy as np
import pytest

from livedraft.bench.lengths import FIXED_DEFAULT, ratio_of_sums, run, seconds_of_rounds
from livedraft.speculation.draft_length import CostModel

COSTS = CostModel(target_seconds_by_rows={1: 1.0, 5: 1.4}, draft_seconds_by_requests={1: 0.1})


def test_rounds_cost_their_draft_steps_and_their_rows():
    assert seconds_of_rounds([0, 0], COSTS) == pytest.approx(2.0)
    assert seconds_of_rounds([4], COSTS) == pytest.approx(0.4 + 1.4)
    assert seconds_of_rounds([], COSTS) == 0


def test_the_ratio_is_of_sums_and_equal_contenders_are_equal_in_every_draw():
    own = np.array([[10, 100], [1.0, 2.0]])
    assert ratio_of_sums(own, own) == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    slow = np.array([[10, 100], [2.0, 8.0]])
    found = ratio_of_sums(own, slow)
    assert found["ratio"] == pytest.approx(10 / 3, abs=1e-3)
    assert found["low"] == 2.0 and found["high"] == 4.0


def test_a_whole_run_on_a_tiny_model(model_folder, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": f"q{n}"}]}) for n in range(6)))
    run(
        prompts=[str(prompts)], limit=4, fixed=[1, 2], num_together=3, max_tokens=12, draft="untrained", state=None,
        model=str(model_folder), dtype="float32", threads=1, as_json=True,
    )  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    names = {"plain", "adaptive", "fixed 1", "fixed 2", f"fixed {FIXED_DEFAULT}"}
    for kind in ("measured", "measured_decoding", "computed", "computed_isolated"):
        assert set(result[kind]["tokens_per_second"]) == names
        assert result[kind]["best_fixed"] in (1, 2, FIXED_DEFAULT)
    assert result["prompts"] == 4 and result["together"]["requests"] == 3
    assert result["together"]["groups"] == 10
    assert result["drafted_a_round"][f"fixed {FIXED_DEFAULT}"] > result["drafted_a_round"]["fixed 1"] > 0
