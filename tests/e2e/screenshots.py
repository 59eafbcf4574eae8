"""The pictures of docs/dashboard.md, from a real run: `python -m tests.e2e.screenshots docs`. Needs Chromium, as the test does.

`livedraft serve --admin-key` learns from the demo's stream; one chat is asked over the page. Minutes long on two cores. No
picture is made of a page without a promotion or with nothing learnt: the machine was too busy, so run it again on a quiet one.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from livedraft.bench.demo_stream import plant_shop_prompts
from livedraft.models.pull import DEFAULT_MODEL
from tests.e2e.browser import Browser, why_not
from tests.e2e.server_process import ServerProcess

NUM_BURSTS, BURST, PAUSE_SECONDS = 7, 10, 10.0
LONGEST_WAIT_SECONDS = 60.0
MAX_BYTES = 250_000
QUESTION = "How often should I water a basil plant on a sunny windowsill?"
SETTINGS = "[speculation]\nsuffix_decoding = false\n[learning]\nnum_threads = 2\nmicro_batch_tokens = 1024\n"


def serve_stream(url: str, model: str) -> None:
    prompts = plant_shop_prompts(NUM_BURSTS * BURST, 0)

    def ask(prompt: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 96}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()

    with ThreadPoolExecutor(BURST) as clients:
        for first in range(0, len(prompts), BURST):
            list(clients.map(ask, prompts[first : first + BURST]))
            time.sleep(PAUSE_SECONDS)  # the draft learns in the pauses


def what_is_missing(browser: Browser) -> str | None:
    """Why the page is not yet worth a picture, as a sentence; None when it is."""
    if "promoted" not in browser.text("#acceptance-legend"):
        return "The curve has no mark of a promotion."
    learnt = re.match(r"([\d,]+) requests learnt from", browser.text("#learning-note"))
    if learnt is None or int(learnt[1].replace(",", "")) == 0:
        return f"Nothing is learnt yet: the page says {browser.text('#learning-note')!r}."
    return None


def wait_for_learning(browser: Browser, seconds: float) -> None:
    """Ends the program with a sentence when that much time does not help."""
    deadline = time.monotonic() + seconds
    while missing := what_is_missing(browser):
        if time.monotonic() > deadline:
            sys.exit(f"{missing} No picture was made; run this on a machine that does nothing else.")
        time.sleep(1.0)


def main(folder: Path) -> None:
    missing = why_not()
    if missing:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as state:
        settings = Path(state) / "settings.toml"
        settings.write_text(SETTINGS)
        arguments = ("--state", state, "--learn", "on", "--admin-key", "key", "--config", settings)
        with ServerProcess(DEFAULT_MODEL, *arguments) as server, Browser(width=1120, height=1400) as browser:
            serve_stream(server.url, DEFAULT_MODEL)
            browser.do.get(f"{server.url}/")
            browser.wait(lambda: browser.text("#acceptance-legend"))
            browser.write("#message", QUESTION)
            browser.click("#send")
            browser.wait(lambda: "tokens in" in browser.text("#chat-status"), 120)
            wait_for_learning(browser, LONGEST_WAIT_SECONDS)
            for name, width, height, theme in (
                ("dashboard-light", 1120, 1180, "light"),
                ("dashboard-dark", 1120, 1180, "dark"),
                ("dashboard-phone", 390, 1000, "light"),
                ("dashboard-chat", 1120, 900, "light"),
            ):
                browser.resize(width, height)
                browser.show_theme(theme)
                where = "document.querySelector('#try').scrollIntoView()" if name.endswith("chat") else "scrollTo(0, 0)"
                browser.run(f"document.activeElement.blur(); {where}")
                time.sleep(2.5)  # the next sample redraws the curves
                path = folder / f"{name}.png"
                browser.screenshot(path)
                size = path.stat().st_size
                print(f"{path}: {size / 1000:.0f} kB")
                if size > MAX_BYTES:
                    sys.exit(f"{path} is larger than {MAX_BYTES} bytes.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
