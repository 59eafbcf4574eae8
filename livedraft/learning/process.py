"""The serving side of the training process: start it, watch it, restart it with back-off, tell it when to step aside."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from livedraft.config import LearningConfig, RoutingConfig
from livedraft.events import Events
from livedraft.records import DEFAULT_ROUTE

EXIT_BAD_INPUT = 3
"""The worker's exit code for a state or model that will not get better by restarting."""
_YIELD_FLAG_NAME = "serving.flag"
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
_HEALTHY_SECONDS = 60.0
"""After running this long a death counts as the first again."""
_POLL_SECONDS = 0.2
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
"""Ctrl-C in a terminal goes to the whole group: the worker ends when its pipe closes, not in the middle of a step. Not a
session of its own: where each session gets its share of the CPU, an idle priority counts within the session only."""


CHECKPOINTS = "trainer.*checkpoint.safetensors"
"""Of all routes' trainers."""


def checkpoint_name(route: str) -> str:
    """In the state folder."""
    return f"trainer.{'' if route == DEFAULT_ROUTE else route + '.'}checkpoint.safetensors"


def trainer_status_name(route: str) -> str:
    """Of the row in which a route's trainer says what it does."""
    return "trainer" if route == DEFAULT_ROUTE else f"trainer:{route}"


def worker_command(
    *, state: Path, target: Path, config: LearningConfig, routing: RoutingConfig, max_positions: int
) -> list[str]:
    """The training process's command line. A module of its own, so the caller's script needs no main guard."""
    return [
        sys.executable, "-m", "livedraft.learning", "--state", str(state), "--target", str(target),
        "--max-positions", str(max_positions), "--settings", json.dumps(asdict(config)),
        "--routing", json.dumps({**asdict(routing), "rules": []}),
    ]  # fmt: skip


def open_yield_flag(state: Path) -> mmap.mmap:
    """One byte shared with the worker: the serving process sets it while requests run or wait."""
    with (state / _YIELD_FLAG_NAME).open("a+b") as file:
        file.truncate(1)  # also one that a full disk left empty
        return mmap.mmap(file.fileno(), 1)


class TrainerProcess:
    """Supervises one worker. Whatever happens to it, serving goes on; every death is an event with its last words."""

    def __init__(self, command: list[str], *, state: Path, num_threads: int, events: Events) -> None:
        self._command = command
        self._events = events
        self._environment = {
            **os.environ,
            # A passive, small pool: two spinning pools on two cores slow each other tenfold.
            "OMP_NUM_THREADS": str(num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "MKL_NUM_THREADS": str(num_threads),
        }
        self._yield_flag = open_yield_flag(state)
        self._yield_flag[0] = 0
        self._errors_path = state / "trainer.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="trainer-supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the living worker; None between a death and the restart."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def set_busy(self, is_busy: bool) -> None:
        """Called by the engine's owner at each change: the worker steps aside while this is set."""
        self._yield_flag[0] = 1 if is_busy else 0

    def close(self) -> None:
        """Close the pipe; the worker ends by itself, and is killed if it does not."""
        self._closing.set()
        self._thread.join()
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=3.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _open_log(self) -> BinaryIO:
        """Where the worker's last words go; nowhere when the disk does not take them."""
        try:
            return self._errors_path.open("ab")
        except OSError:
            return open(os.devnull, "ab")

    def _supervise(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                with self._open_log() as errors:
                    self._process = subprocess.Popen(
                        self._command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, env=self._environment,
                        **_OWN_GROUP,
                    )  # fmt: skip
            except OSError as error:  # no memory or no process for now
                self._events.emit(
                    "trainer_died", exit_code=None, last_words=str(error), restart_in_seconds=LONGEST_BACKOFF_SECONDS
                )
                if self._closing.wait(LONGEST_BACKOFF_SECONDS):
                    return
                continue
            _lower_priority(self._process.pid)
            while self._process.poll() is None:
                if self._closing.wait(_POLL_SECONDS):
                    return
            exit_code = self._process.returncode
            if self._process.stdin is not None:
                self._process.stdin.close()
            if time.monotonic() - started > _HEALTHY_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            is_final = exit_code == EXIT_BAD_INPUT
            self._events.emit(
                "trainer_died",
                exit_code=exit_code,
                last_words=_last_line(self._errors_path),
                restart_in_seconds=None if is_final else backoff,
            )
            if is_final or self._closing.wait(backoff):
                return
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return f"(its log cannot be read: {error.strerror})"
    return lines[-1] if lines else ""


def _lower_priority(pid: int) -> None:
    """The idle scheduling class where there is one, else the lowest priority: serving always goes first."""
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        try:
            os.setpriority(os.PRIO_PROCESS, pid, 19)
        except (AttributeError, OSError):
            return  # it died at once, or this system has no priorities; the supervisor reports a death
