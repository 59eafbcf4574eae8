"""The commands of README and quick start, run as they stand: in an empty home, with the real model, one after the other, so
that what one leaves the next one finds. What is not run is named here with its reason; what is neither is an error."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from livedraft.bench.demo_stream import plant_shop_prompts
from livedraft.models.pull import models_folder
from tests.docs.markdown import ROOT, blocks, words

NOT_RUN = {
    "make": "the suite that runs this, and the demo, which has a test of its own; see docs/first-run.md",
    "pip install": "installs into the running environment; tests/test_packaging.py installs the wheel",
    "docker": "needs a daemon; tests/deploy/test_deploy.py reads the Dockerfile",
    "livedraft serve FOLDER": "FOLDER is the reader's own model",
    "livedraft demo": "three minutes; tests/e2e/test_demo.py",
    "livedraft distill": "minutes; tests/e2e/test_distill.py",
    "livedraft serve --draft my-draft/distillspec": "the draft that distill would have made",
    "livedraft bench": "minutes of measuring each; tests/bench runs them on a tiny model",
    "livedraft vllm": "needs an environment with vLLM; tests/vllm (make test-vllm) starts it as it stands",
}
INPUT = {"livedraft chat": "Name two rivers.\n"}
ADDRESS = "127.0.0.1:8000"


def reason_not_to_run(command):
    return next((reason for beginning, reason in NOT_RUN.items() if command.startswith(beginning)), None)


class Shell:
    """Runs commands as a reader would; a server that one of them starts stays for the next ones."""

    def __init__(self, folder):
        self.folder = folder
        self.server = None
        self.port = _free_port()
        program = folder / "bin" / "livedraft"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m livedraft "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        prompts = folder / "prompts" / "gsm8k.jsonl"
        prompts.parent.mkdir()
        prompts.write_text("".join(f'{{"turns": ["{prompt}"]}}\n' for prompt in plant_shop_prompts(40, seed=3)))
        self.environment = {
            "HOME": str(folder), "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "PROMPTS": str(prompts.parent), "LIVEDRAFT_MODELS": str(models_folder()),
            "LIVEDRAFT_SERVER__PORT": str(self.port),
        }  # fmt: skip

    def run(self, command):
        here = command.replace(ADDRESS, f"127.0.0.1:{self.port}")
        verb = words(here)[:2]
        if verb == ["livedraft", "serve"]:
            self._serve(here)
            return ""
        if verb == ["livedraft", "doctor"]:  # asks whether a server would start
            self.stop()
        given = next((text for beginning, text in INPUT.items() if command.startswith(beginning)), "")
        return self._output(["bash", "-c", here], command, given)

    def python(self, text):
        here = text.replace(ADDRESS, f"127.0.0.1:{self.port}")
        return self._output([sys.executable, "-c", here], text, "")

    def _output(self, command, shown, given):
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{shown}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        return result.stdout

    def _serve(self, command):
        self.stop()
        log = self.folder / "server.log"
        with log.open("w") as file:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, stdout=file, stderr=file
            )
        deadline = time.monotonic() + 120
        while "curl " not in log.read_text():
            assert self.server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        self._have_a_client()

    def _have_a_client(self):
        """Somebody's traffic, which the reader has and this home has not: the conversations of `chat` are not kept."""
        body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 8, "user": "U"}
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        kept = self.folder / ".local" / "state" / "livedraft" / "traces"
        deadline = time.monotonic() + 30
        while not list(kept.glob("*.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stop(self):
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(timeout=60) == 0
            self.server = None


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def shell(smollm2_path, tmp_path):
    made = Shell(tmp_path)
    yield made
    made.stop()


def commands_of(file):
    return [command for block in blocks(file) for command in block.commands]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_the_commands_run_and_the_python_too(shell, name):
    num_run = 0
    for block in blocks(ROOT / name):
        for command in block.commands:
            if reason_not_to_run(command) is None:
                shell.run(command)
                num_run += 1
        if block.language == "python":
            # The state folder of a running server is its own: an LLM beside it has none.
            assert shell.python(block.text).strip()
            num_run += 1
    assert num_run >= 9


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_every_command_is_run_or_has_a_reason_why_not(name):
    for command in commands_of(ROOT / name):
        program = words(command)[0]
        assert reason_not_to_run(command) or program in ("livedraft", "curl"), command
        stands_for_another = [word for word in words(command) if re.fullmatch(r"[A-Z]{3,}", word)]
        assert reason_not_to_run(command) or not stands_for_another, command


def test_no_reason_is_left_over():
    shown = [command for name in ("README.md", "docs/quickstart.md") for command in commands_of(ROOT / name)]
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in shown), beginning


def test_toml_that_is_shown_is_taken(tmp_path):
    from livedraft.settings import load_settings

    for file in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        for number, block in enumerate(block for block in blocks(file) if block.language == "toml"):
            path = tmp_path / f"{file.name}-{number}.toml"
            path.write_text(re.sub(r'\["\.\.\."\]', '["key"]', block.text))
            load_settings(path, {}, {})


def test_nothing_is_taken_from_this_machine(shell):
    assert Path(shell.environment["HOME"]) != Path.home()
    assert shutil.which("livedraft", path=shell.environment["PATH"]) == str(shell.folder / "bin" / "livedraft")
