"""The one progress bar of everything that takes long: on standard error, so that standard output stays the result's."""

from __future__ import annotations

import atexit

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """`bar("recorded requests", 3, 40)`: shown from the first call on, until `stop`. Where standard error is no terminal only
    the last state is printed. Ctrl-C gives the terminal's cursor back."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeElapsedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._task: TaskID | None = None

    def __call__(self, text: str, num_done: int, num_all: int) -> None:
        if self._task is None:
            self._progress.start()
            atexit.register(self._progress.stop)
            self._task = self._progress.add_task(text, total=num_all)
        self._progress.update(self._task, description=text, completed=num_done, total=num_all)

    def stop(self) -> None:
        self._progress.stop()
        atexit.unregister(self._progress.stop)
        if self._task is not None:  # the next one begins alone
            self._progress.remove_task(self._task)
            self._task = None
