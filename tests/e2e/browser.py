"""Debian's Chromium without a screen, driven by Selenium: what the dashboard's test and its screenshots share."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[2] / "build" / "axe-core" / "axe.min.js"))
"""axe-core's own file; `make axe` fetches it with npm."""


def why_not() -> str | None:
    """What is missing for a browser, as a sentence; None when nothing is."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "Selenium is not installed (pip install selenium); the dashboard was NOT tried in a browser."
    if CHROMIUM is None or DRIVER is None:
        return (
            "No chromium or no chromedriver here (apt install chromium chromium-driver); the dashboard was NOT tried in a "
            "browser."
        )
    return None


class Browser:
    """`with Browser() as browser:`; `do` gives Selenium's driver, the rest is what a test says often."""

    def __init__(self, *, width: int = 1280, height: int = 1000, theme: str = "light") -> None:
        from selenium import webdriver

        self._profile = tempfile.TemporaryDirectory(prefix="livedraft-browser-")
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en-GB",
            f"--user-data-dir={self._profile.name}", "--no-first-run", "--disable-background-networking",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.do = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
        self.resize(width, height)
        self.show_theme(theme)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.do.quit()
        self._profile.cleanup()

    def resize(self, width: int, height: int) -> None:
        self.do.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def show_theme(self, theme: str) -> None:
        """What the system prefers, "light" or "dark"."""
        self.do.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.do.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """Of the first such element; empty when there is none, or none to be seen."""
        return (self.texts(selector) or [""])[0]

    def texts(self, selector: str) -> list[str]:
        look = "return [...document.querySelectorAll(arguments[0])].map((e) => e.checkVisibility() ? e.innerText : '')"
        return list(self.run(look, selector))

    def click(self, selector: str) -> None:
        from selenium.webdriver.common.by import By

        self.do.find_element(By.CSS_SELECTOR, selector).click()

    def write(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.by import By

        self.do.find_element(By.CSS_SELECTOR, selector).send_keys(text)

    def wait(self, look: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < deadline, f"waited {seconds} s for nothing; the page says:\n{self.text('body')}"
            time.sleep(0.1)
        return found

    def complaints(self) -> list[str]:
        """Of the console since the last call, warnings included."""
        return [f"{row['level']}: {row['message']}" for row in self.do.get_log("browser") if row["level"] != "DEBUG"]

    def screenshot(self, path: Path) -> None:
        """What is in view."""
        path.write_bytes(self.do.get_screenshot_as_png())
