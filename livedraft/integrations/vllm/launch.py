"""vLLM as a child process in an environment of its own: what is installed there, the command line, start and end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import livedraft
from livedraft.records import UserError

OLDEST, TOO_NEW = (0, 31), (0, 34)
"""vLLM's versions with everything this rests on, by their source; 0.32.0 is the one that is run in tests."""
TESTED = "0.32.0"
EXTENSION = "livedraft.integrations.vllm.worker_extension.WorkerExtension"
_INSIDE = (
    "__init__.py", "records.py", "integrations/__init__.py", "integrations/vllm/__init__.py",
    "integrations/vllm/worker_extension.py", "integrations/vllm/tap.py", "integrations/vllm/shipping.py",
    "integrations/vllm/weights.py", "integrations/vllm/sampling_guard.py", "integrations/vllm/wire.py",
)  # fmt: skip
"""All of livedraft that runs inside vLLM."""
_LOOK = """
import json, vllm
from vllm.platforms import current_platform
print("LIVEDRAFT " + json.dumps({"version": vllm.__version__, "is_cpu": current_platform.is_cpu()}))
"""
_LOOK_SECONDS, _END_SECONDS = 300.0, 15.0


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python with vLLM."""

    python: Path
    version: str
    is_cpu: bool


def look_at(python: Path) -> Environment:
    """Import vLLM there. Raises UserError when there is none, or one outside the window of supported versions."""
    try:
        found = subprocess.run(
            [str(python), "-c", _LOOK], capture_output=True, text=True, timeout=_LOOK_SECONDS, env=_environment(None)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{python} cannot be run ({error}); give --python the interpreter vLLM is installed for."
        ) from error
    line = next((line for line in found.stdout.splitlines() if line.startswith("LIVEDRAFT ")), None)
    if line is None:
        last = (found.stderr.strip().splitlines() or ["no word"])[-1]
        raise UserError(f"vLLM cannot be imported by {python}: {last}. docs/vllm.md says how to install it.")
    seen = json.loads(line.removeprefix("LIVEDRAFT "))
    require_supported(seen["version"])
    return Environment(python=python, version=seen["version"], is_cpu=seen["is_cpu"])


def require_supported(version: str) -> None:
    """Raises UserError naming what was found and what was tested."""
    numbers = version.split("+")[0].split(".")
    try:
        release = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        release = (0, 0)
    if not OLDEST <= release < TOO_NEW:
        raise UserError(
            f"vLLM {version} is not supported: from {_dotted(OLDEST)} to below {_dotted(TOO_NEW)}, tested with {TESTED}. "
            "livedraft reads vLLM's internals, so other versions are not tried."
        )


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def write_inside_part(folder: Path) -> Path:
    """A copy of what runs inside vLLM, to be put on its PYTHONPATH: always of this version, and without livedraft's own
    dependencies. Returns the folder."""
    source = Path(livedraft.__file__).parent
    shutil.rmtree(folder, ignore_errors=True)
    for name in _INSIDE:
        target = folder / "livedraft" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    return folder


def _environment(inside_part: Path | None) -> dict[str, str]:
    """For the child: ours without what only we need."""
    ours = ("LIVEDRAFT_", "PYTHON", "VLLM_API_KEY")  # the public server asks for keys, vLLM on loopback for none
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if inside_part is None:
        return kept
    return kept | {
        "PYTHONPATH": str(inside_part.resolve()),
        "PYTHONSAFEPATH": "1",  # not what lies in the current folder (from Python 3.11 on)
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc: why the child listens on loopback only
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the tap knows the first
        "VLLM_NO_USAGE_STATS": "1",
    }


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What every replica of one server has in common."""

    environment: Environment
    target: Path
    served_name: str
    inside_part: Path
    num_speculative_tokens: int
    max_model_len: int | None
    kv_cache_bytes: int | None
    arguments: tuple[str, ...] = ()
    """Passed to vLLM as they are, last."""

    def command(self, port: int, draft: Path | None, method: str) -> list[str]:
        """`method`: draft_model, with the draft's folder; ngram; or none."""
        flags: dict[str, Any] = {
            "--model": self.target,
            "--served-model-name": self.served_name,
            "--host": "127.0.0.1",
            "--port": port,
            "--worker-extension-cls": EXTENSION,
            "--max-model-len": self.max_model_len,
            "--kv-cache-memory-bytes": self.kv_cache_bytes,
        }
        speculative = self._speculative(draft, method)
        if speculative is not None:
            flags["--speculative-config"] = json.dumps(speculative)
        command = [str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in flags.items():
            command += [] if value is None else [name, str(value)]
        if self.environment.is_cpu:
            command += ["--enforce-eager", "--dtype", "bfloat16"]  # compiling takes minutes there
        return [*command, *self.arguments]

    def _speculative(self, draft: Path | None, method: str) -> dict[str, Any] | None:
        k = self.num_speculative_tokens
        if method == "draft_model":
            # Drafts are judged by the sum of min(target, draft) probabilities, so tokens are drawn from theirs.
            return {
                "method": "draft_model", "model": str(draft), "num_speculative_tokens": k,
                "draft_sample_method": "probabilistic",
            }  # fmt: skip
        if method == "ngram":
            return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return None


def end_leftover(marker: Path) -> None:
    """The server that a parent, killed before it could end it, has left; `marker` holds its process id. Told from another
    process of that id by its command line."""
    try:
        pid = int(marker.read_text(encoding="utf-8"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return
    if EXTENSION.encode() in command:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


class VllmProcess:
    """One server process, its own process group: vLLM starts children."""

    def __init__(
        self, config: LaunchConfig, *, port: int, draft: Path | None, method: str, log: Path, core: int | None = None
    ) -> None:
        """`core`: bind its computing to that one, on a CPU with several servers, which would all choose the same. Raises
        UserError when it cannot be started at all."""
        environment = _environment(config.inside_part)
        if core is not None and config.environment.is_cpu:
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(core))
        self.port, self._log = port, log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    config.command(port, draft, method), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=environment, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise UserError(f"vLLM could not be started ({error}).") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError as error:
            return str(error)
        errors = [line for line in lines[-200:] if "Error" in line]
        return (errors or lines or ["no word"])[-1].strip()[-300:]

    def end(self, *, at_once: bool = False) -> None:
        """It and its children; what does not leave is killed."""
        try:
            if not at_once:
                os.killpg(self._process.pid, signal.SIGTERM)
                self._process.wait(_END_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                break  # nobody is left in the group
            self._process.poll()
            time.sleep(0.1)
        self._process.wait()
