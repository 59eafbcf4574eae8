"""`make test-vllm` is a stage of its own; that its files still fit the rest is looked at here."""

import os
import subprocess
import sys


def test_the_tests_beside_vllm_can_be_collected():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/vllm"],
        env={**os.environ, "VLLM_PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "test_fleet.py" in result.stdout
