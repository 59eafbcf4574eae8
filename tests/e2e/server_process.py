"""`livedraft serve` as a user starts it, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

TINY_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class ServerProcess:
    """`with ServerProcess("MODEL", "--no-learn") as server:`; `url`, `banner`, `pid`, and the exit code after `stop`."""

    def __init__(
        self,
        *arguments: object,
        before_start: Callable[[], None] | None = None,
        verb: tuple[str, ...] = ("serve",),
        passed_on: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        """`before_start` runs in the new process, for limits; `passed_on` stands after --."""
        command = [sys.executable, "-m", "livedraft", *verb, *map(str, arguments), "--port", "0", *passed_on]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
            preexec_fn=before_start,
        )  # fmt: skip
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("curl "):
                break
        self.banner = "".join(lines)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1 ", self.banner)
        assert found, self.banner + "".join(self.errors)
        self.url = found[1]
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the server."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr
        self.process.stderr.close()
