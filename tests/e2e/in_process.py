"""The command line without a process of its own: for tests of what a verb does, where starting Python would be most of the
time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

from typer.testing import CliRunner

from livedraft.cli.main import app
from livedraft.records import UserError


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


def livedraft(*arguments: object, **environment: str) -> Outcome:
    """As the real command: an error of the user's is one sentence on standard error and exit code 1."""
    with mock.patch.dict(os.environ, environment):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, (UserError, ValueError)):
        return Outcome(1, result.stdout, f"livedraft: {result.exception}\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)
