import subprocess
import sys
from pathlib import Path

import pytest

from livedraft.integrations.vllm.launch import (
    EXTENSION,
    Environment,
    LaunchConfig,
    VllmProcess,
    end_leftover,
    look_at,
    require_supported,
    write_inside_part,
)
from livedraft.records import UserError


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.0+cpu", "0.33.2.dev4"])
def test_versions_within_the_window(version):
    require_supported(version)


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.0", "dev", ""])
def test_versions_outside_are_refused_with_what_was_found_and_tested(version):
    with pytest.raises(UserError, match=r"not supported: from 0\.31 to below 0\.34, tested with 0\.32\.0"):
        require_supported(version)


def test_a_python_without_vllm_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"cannot be imported by .*ModuleNotFoundError"):
        look_at(Path(sys.executable))
    with pytest.raises(UserError, match="cannot be run"):
        look_at(Path("/no/python"))


def test_the_inside_part_is_all_that_the_extension_imports(tmp_path):
    """Without livedraft's own folder, its files are enough, and none is there for nothing."""
    part = write_inside_part(tmp_path / "part")
    code = (
        "import sys, livedraft.integrations.vllm.worker_extension as w; "
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'livedraft'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(part)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(found.stdout.split()) == sorted(str(file) for file in part.rglob("*.py"))


def config(**fields) -> LaunchConfig:
    environment = Environment(python=Path(sys.executable), version="0.32.0", is_cpu=True)
    return LaunchConfig(
        **{
            "environment": environment, "target": Path("/t"), "served_name": "m", "inside_part": Path("/i"),
            "num_speculative_tokens": 3, "max_model_len": 512, "kv_cache_bytes": 100, **fields,
        }
    )  # fmt: skip


def test_the_command_line_listens_on_loopback_and_ends_with_the_users_own_words():
    command = config(arguments=("--dtype", "float32")).command(8123, Path("/d"), "draft_model")
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--worker-extension-cls") + 1] == EXTENSION
    assert '"draft_sample_method": "probabilistic"' in command[command.index("--speculative-config") + 1]
    assert "--enforce-eager" in command and command[-2:] == ["--dtype", "float32"]
    assert "--speculative-config" not in config().command(1, None, "none")
    ngram = config().command(1, None, "ngram")
    assert '"method": "ngram"' in ngram[ngram.index("--speculative-config") + 1]
    assert "--kv-cache-memory-bytes" not in config(kv_cache_bytes=None).command(1, None, "none")


def test_what_a_killed_parent_left_is_ended_and_nothing_else(tmp_path):
    marker = tmp_path / "replica-0.pid"
    end_leftover(marker)  # none there
    sleep = "import time; time.sleep(60)"
    ours = subprocess.Popen([sys.executable, "-c", sleep, EXTENSION], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    try:
        for process in (ours, other):
            marker.write_text(str(process.pid))
            end_leftover(marker)
        assert ours.wait(5) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_last_words_name_the_error(tmp_path):
    """The interpreter is no vLLM: it ends at once and says why."""
    process = VllmProcess(config(), port=1, draft=None, method="none", log=tmp_path / "logs" / "replica.log")
    process.end()
    assert process.exit_code is not None
    (tmp_path / "logs" / "replica.log").write_text("INFO x\nValueError: no such model\nINFO bye\n")
    assert process.last_words() == "ValueError: no such model"
