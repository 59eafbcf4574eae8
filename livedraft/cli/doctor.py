"""`livedraft doctor`: what on this machine keeps `livedraft serve` from starting or makes it slow, each with the command that
mends it. Nothing is changed, made or loaded, except the kernels, which are built into the user's cache as `serve` would."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from livedraft import __version__
from livedraft.records import UserError
from livedraft.settings import Settings

Level = Literal["ok", "note", "warning", "failure"]
_COLOURS: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. note: nothing to mend unless wanted; warning: slower, or less than it could be; failure:
    `serve` would not start."""

    name: str
    level: Level = "ok"
    text: str
    fix: str | None = None
    """A command, or a line of settings; a warning or a failure has one."""

    def __post_init__(self) -> None:
        if self.level in ("warning", "failure") and not self.fix:
            raise ValueError(f"The {self.level} {self.text!r} must name a fix.")


def run(settings: Settings, *, as_json: bool) -> int:
    """Look at everything and print it; returns the exit code: 1 when `serve` with these settings would fail."""
    findings = look(settings)
    would_serve = all(finding.level != "failure" for finding in findings)
    if as_json:
        print(json.dumps({"would_serve": would_serve, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    return 0 if would_serve else 1


def look(settings: Settings) -> list[Finding]:
    """Every finding, in the order in which one would mend them."""
    findings = [Finding(name="livedraft", text=f"{__version__}, Python {sys.version.split()[0]} at {sys.executable}")]
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library it needs is not there
        fix = "python -m pip install --force-reinstall torch"
        return [*findings, Finding(name="torch", level="failure", text=f"cannot be imported: {error}", fix=fix)]
    from livedraft.cli import checks

    for check in checks.ALL:
        findings += _guarded(check, settings)
    return findings


def _guarded(check: Callable[[Settings], list[Finding]], settings: Settings) -> list[Finding]:
    """A check that meets what it did not expect is a finding, not the end of the others."""
    name = check.__name__.removeprefix("check_")
    try:
        return check(settings)
    except UserError as error:
        fix = "livedraft config show  # what is set, file and environment included"
        return [Finding(name=name, level="failure", text=str(error), fix=fix)]
    except Exception as error:
        text = f"could not be looked at ({type(error).__name__}: {error})"
        fix = "python -m pip install --upgrade livedraft  # and report it if it stays"
        return [Finding(name=name, level="warning", text=text, fix=fix)]


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = max(80, shutil.get_terminal_size().columns)
    console = Console(width=width, soft_wrap=False)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(
            Text(finding.level, style=_COLOURS[finding.level]), Text(finding.name), Text(finding.text, overflow="fold")
        )
        if finding.fix is not None:
            table.add_row("", "", Text(f"-> {finding.fix}", style="bold", overflow="fold"))
    console.print(table)
    failures = [finding.name for finding in findings if finding.level == "failure"]
    num_warnings = sum(finding.level == "warning" for finding in findings)
    warnings = "no warnings" if num_warnings == 0 else f"{num_warnings} warning{'s' if num_warnings > 1 else ''}"
    verdict = f"would fail: {', '.join(failures)}" if failures else "would start"
    console.print(f"\n`livedraft serve` {verdict}; {warnings}.", highlight=False)
