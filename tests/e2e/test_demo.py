"""The demo itself, on the real model: its figures are the product's promise. Minutes long, so `make test-long` only."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.model]


def demo(*arguments):
    result = subprocess.run(
        [sys.executable, "-m", "livedraft", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.timeout(480)
def test_full_demo_keeps_its_promise(smollm2_path):
    figures = demo()
    assert figures["requests"] == 200
    assert figures["alpha_end"] - figures["alpha_start"] >= 0.25
    assert figures["versions_promoted"] >= 2
    assert figures["speedup"] >= 1.4
    assert figures["same_output"] == figures["compared"] >= 10
    assert figures["repeated_8_gram_share"] <= 0.5


@pytest.mark.timeout(480)
def test_short_demo_keeps_its_promise(smollm2_path):
    figures = demo("--requests", "60")
    assert figures["alpha_end"] - figures["alpha_start"] >= 0.15
    assert figures["versions_promoted"] >= 1
    assert figures["speedup"] >= 1.1
    assert figures["same_output"] == figures["compared"]
    for name in ("plain_tokens_per_second", "untrained_tokens_per_second", "learned_tokens_per_second", "near_ties"):
        assert name in figures
