"""The one progress bar of everything that takes long: on standard error, so that standard output stays the result's."""

from __future__ import annotations

import atexit
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_SECONDS = 30.0


class Bar:
    """`bar("recorded requests", 3, 40)`: shown from the first call on, until `stop`. In a log, where standard error is no
    terminal, a line says how far it is twice a minute, and the last state. Ctrl-C gives the terminal's cursor back."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._said_at = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeElapsedColumn(), TimeRemainingColumn(),
            console=self._console,
        )  # fmt: skip
        self._task: TaskID | None = None

    def __call__(self, text: str, num_done: int, num_all: int) -> None:
        if self._task is None:
            self._progress.start()
            atexit.register(self._progress.stop)
            self._task = self._progress.add_task(text, total=num_all)
        if not self._console.is_terminal and time.monotonic() - self._said_at >= PLAIN_SECONDS:
            self._said_at = time.monotonic()
            self._console.print(f"{text}: {num_done} of {num_all}", markup=False, highlight=False)
        self._progress.update(self._task, description=text, completed=num_done, total=num_all)

    def stop(self) -> None:
        self._progress.stop()
        atexit.unregister(self._progress.stop)
        if self._task is not None:  # the next one begins alone
            self._progress.remove_task(self._task)
            self._task = None
