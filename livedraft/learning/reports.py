"""What a trainer says of itself to whoever looks at the state folder: its status row, its problems, what happened.

What cannot be written, with the disk full or the database locked, goes to standard error and is lost: training goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from livedraft.drafts.database import record_events, write_status
from livedraft.learning.process import trainer_status_name
from livedraft.records import UserError

REPORT_SECONDS = 5.0
"""The status is written when it changes, and its figures at least this often."""


class Reports:
    def __init__(self, state: Path, route: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        """`figures` go into the status row beside its word."""
        self._state, self._route, self._figures = state, route, figures
        self.last_problem = ""
        self._status = ""
        self._reported_at = 0.0

    def status(self, status: str) -> None:
        """Written when it changes and now and then; the serving process shows it."""
        now = time.monotonic()
        if status == self._status and now - self._reported_at < REPORT_SECONDS:
            return
        self._status, self._reported_at = status, now
        fields = {"status": status, **self._figures(), "last_problem": self.last_problem}
        try:
            write_status(self._state, trainer_status_name(self._route), fields)
        except UserError as error:  # shown next time
            print(f"status not written: {error}", file=sys.stderr, flush=True)

    def problem(self, problem: str) -> None:
        """Said once, until there is another."""
        if problem == self.last_problem:
            return
        self.last_problem = problem
        print(problem, file=sys.stderr, flush=True)
        self.event("training_problem", reason=problem)
        self._status = ""  # to be written again, with the problem

    def event(self, name: str, **fields: Any) -> None:
        try:
            record_events(self._state, [{"event": name, "time": time.time(), **fields}])
        except UserError as error:
            print(f"{name} not recorded: {error}", file=sys.stderr, flush=True)
