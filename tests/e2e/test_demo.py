"""The demo itself, on the real model: its figures are the product's promise. Minutes long, so `make test-long` only."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tests.e2e.browser import Browser, why_not
from tests.e2e.test_dashboard import CURVE, PIXELS

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


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.timeout(480)
def test_the_page_of_the_demo_moves_shows_what_the_gate_let_through_and_stays_until_the_table(smollm2_path):
    command = [sys.executable, "-m", "livedraft", "demo", "--open", "--requests", "60"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "BROWSER": "true"}
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()

    def line_with(words):
        assert process.poll() is None or any(words in line for line in lines), lines
        return next((line for line in lines if words in line), None)

    def until(words, seconds):
        deadline = time.monotonic() + seconds
        while (line := line_with(words)) is None:
            assert time.monotonic() < deadline, lines
            time.sleep(0.1)
        return line

    try:
        with Browser() as browser:
            browser.do.get(until("Dashboard: ", 120).split()[1])
            first = browser.wait(lambda: browser.text("#acceptance-card") and browser.run(CURVE), 60)
            drawn = browser.run(PIXELS)
            browser.wait(lambda: browser.run(CURVE) != first)
            browser.wait(lambda: browser.run(PIXELS) != drawn)
            browser.wait(lambda: "promoted" in browser.text("#acceptance-legend"), 150)
            in_service = next(row for row in browser.texts("#versions tbody tr") if "in service" in row)
            assert "p = " in in_service  # by the gate, and no operator
            until("Learning stopped", 150)
            time.sleep(3.0)  # the comparison runs; the page is looked at still
            assert browser.text("#phase") == "ready"
            assert "promoted" in browser.text("#acceptance-legend")
            assert "requests learnt from" in browser.text("#learning-note")
            assert [line for line in browser.complaints() if "willReadFrequently" not in line] == []  # of PIXELS
            assert line_with("Held-out prompts, batch 1") is None
            assert process.wait(timeout=180) == 0
        reader.join(timeout=10)
        assert line_with("Learned draft: ")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(timeout=10)
        process.stdout.close()
