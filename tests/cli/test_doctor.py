"""`livedraft doctor`: each thing that can be wrong, made wrong, is found and named with what mends it."""

import ast
import inspect
import json
import socket
import sqlite3
from contextlib import closing

import pytest
import torch

from livedraft.cli import checks, doctor
from livedraft.device import ExecutionPath
from livedraft.drafts.database import DATABASE_NAME, DATABASE_SCHEMA_VERSION, open_database, set_control, write_status
from livedraft.drafts.registry import lock_state
from livedraft.models import pull
from livedraft.settings import load_settings
from tests.docs.markdown import ROOT
from tests.e2e.in_process import livedraft


def settings(**sections):
    return load_settings(None, sections, {})


def only(findings, level=None):
    found = [one for one in findings if level is None or one.level == level]
    assert len(found) == 1, findings
    return found[0]


def test_a_machine_that_can_serve_is_said_to_and_nothing_is_written(model_folder, tmp_path):
    state = tmp_path / "state"
    result = livedraft("doctor", model_folder, "--state", state, "--port", 0, "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0, report
    assert report["would_serve"]
    looked_at = {finding["name"] for finding in report["findings"]}
    assert looked_at >= {
        "torch",
        "gpu",
        "cpu",
        "kernels",
        "threads",
        "model",
        "memory",
        "state",
        "disk",
        "address",
        "extras",
    }
    assert not state.exists()


def test_what_keeps_serve_from_starting_is_exit_code_1_and_has_a_command(tmp_path):
    result = livedraft("doctor", "--port", 0, LIVEDRAFT_MODELS=str(tmp_path))
    assert result.returncode == 1
    assert "livedraft pull smollm2-135m" in result.stdout
    assert "would fail: model" in " ".join(result.stdout.split())
    assert livedraft("doctor", tmp_path / "nowhere", "--port", 0).returncode == 1


def test_a_pulled_file_that_is_not_whole_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVEDRAFT_MODELS", str(tmp_path))
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half of it")
    finding = only(checks.check_model(settings()))
    assert (finding.level, finding.fix) == ("failure", "livedraft pull smollm2-135m")
    assert not pull.is_whole("smollm2-135m")


def test_a_taken_port_says_who_has_it(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(checks, "_livedraft_at", lambda host, port: None)
        finding = only(checks.check_address(settings(server={"port": port})))
        assert finding.level == "failure"
        assert "--port" in finding.fix
        monkeypatch.setattr(checks, "_livedraft_at", lambda host, port: "ready")
        assert "a livedraft answers" in only(checks.check_address(settings(server={"port": port}))).text
    assert only(checks.check_address(settings(server={"port": port}))).level == "ok"


def test_an_address_open_to_everybody_without_a_key_is_a_warning():
    assert only(checks.check_address(settings(server={"host": "0.0.0.0", "port": 0}))).level == "warning"
    with_key = settings(server={"host": "0.0.0.0", "port": 0, "api_keys": ("k",)})
    assert only(checks.check_address(with_key)).level == "ok"
    assert only(checks.check_address(settings(server={"host": "no-such-host.invalid"}))).level == "failure"


def test_states_that_are_used_newer_paused_or_nowhere(tmp_path):
    state = tmp_path / "state"
    here = settings(model={"state": str(state)})
    assert only(checks.check_state(here)).level == "ok"
    lock = lock_state(state)
    assert "used by a livedraft" in only(checks.check_state(here)).text
    lock.close()
    assert only(checks.check_state(here)).level == "ok"
    set_control(state, "paused", 1)
    write_status(state, "trainer", {"last_problem": "no room"})
    assert only(checks.check_state(here), "note").fix == f"livedraft learn resume --state {state}"
    assert "no room" in only(checks.check_state(here), "warning").text
    with closing(sqlite3.connect(state / DATABASE_NAME)) as connection:
        connection.execute(f"PRAGMA user_version={DATABASE_SCHEMA_VERSION + 1}")
    assert "newer livedraft" in only(checks.check_state(here), "failure").text
    file = tmp_path / "file"
    file.write_text("")
    assert only(checks.check_state(settings(model={"state": str(file / "state")}))).level == "failure"
    assert "nothing is stored" in only(checks.check_state(settings(model={"learn": False}))).text


def test_looking_does_not_migrate_an_older_database(tmp_path):
    with open_database(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection:
        connection.execute("PRAGMA user_version=1")
    assert only(checks.check_state(settings(model={"state": str(tmp_path)}))).level == "ok"
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 1


def test_a_network_filesystem_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_filesystem", lambda path: "nfs4")
    assert "network filesystem" in only(checks.check_state(settings(model={"state": str(tmp_path)})), "warning").text


def test_the_filesystem_of_a_path_is_the_longest_mount_around_it(tmp_path):
    assert checks._filesystem(tmp_path) not in ("", "proc")


@pytest.mark.parametrize(
    ("reason", "level", "fix"),
    [
        (None, "ok", None),
        ("there is no C++ compiler (g++)", "warning", "g++"),
        ("switched off by LIVEDRAFT_KERNELS=torch", "warning", "unset LIVEDRAFT_KERNELS"),
        ("this CPU has no AVX2", "note", None),
    ],
)
def test_kernels(monkeypatch, reason, level, fix):
    monkeypatch.setattr(checks, "unavailable_reason", lambda *_: reason)
    monkeypatch.setattr(checks.shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "apt-get" else None)
    finding = only(checks.check_kernels(settings()))
    assert finding.level == level
    assert finding.fix is None if fix is None else fix in finding.fix


@pytest.mark.parametrize(
    ("cuda", "has_device_file", "sees_gpu", "level"),
    [
        (None, False, False, "ok"),
        (None, True, False, "warning"),
        ("13.0", True, False, "warning"),
        ("13.0", False, False, "note"),
        ("13.0", True, True, "ok"),
    ],
)
def test_builds_of_torch(monkeypatch, cuda, has_device_file, sees_gpu, level):
    monkeypatch.setattr(checks.torch.version, "cuda", cuda)
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(checks.shutil, "which", lambda tool: tool if has_device_file else None)
    finding = only(checks.check_torch(settings()))
    assert finding.level == level
    assert (finding.fix is None) == (level == "ok")


def test_threads_and_what_a_container_may_use(monkeypatch, tmp_path):
    monkeypatch.setattr(checks.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(checks, "num_available_cores", lambda: 8)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(checks, "_cpu_quota", lambda: None)
    assert only(checks.check_threads(settings())).level == "ok"
    assert only(checks.check_threads(settings(model={"num_threads": 9}))).fix == "livedraft serve --threads 8"
    monkeypatch.setattr(checks, "_cpu_quota", lambda: 2.5)
    assert only(checks.check_threads(settings())).fix == "livedraft serve --threads 2"
    monkeypatch.setattr(checks.os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert [finding.level for finding in checks.check_threads(settings())] == ["warning"] * 3


def test_the_quota_of_a_container_is_read(tmp_path):
    from livedraft.cli.checks import _cpu_quota

    file = tmp_path / "cpu.max"
    assert _cpu_quota(file) is None
    file.write_text("max 100000\n")
    assert _cpu_quota(file) is None
    file.write_text("150000 100000\n")
    assert _cpu_quota(file) == 1.5


def test_memory_and_disk_that_are_too_small(model_folder, tmp_path, monkeypatch):
    on_gpu = ExecutionPath(device=torch.device("cuda"), dtype=torch.bfloat16, is_prepacked=False)
    here = settings(model={"name": str(model_folder), "state": str(tmp_path)})
    monkeypatch.setattr(checks, "available_memory_bytes", lambda device: 1000)
    assert only(checks.check_model(here), "failure").name == "memory"
    monkeypatch.setattr(checks, "choose_execution_path", lambda *_: on_gpu)
    assert "on the GPU, weights take" in (failure := only(checks.check_model(here), "failure")).text
    assert failure.fix.startswith("nvidia-smi")
    full = type("Usage", (), {"free": 2**29})
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: full)
    assert [finding.level for finding in checks.check_disk(here)] == ["warning", "warning"]


@pytest.mark.parametrize(
    ("products", "quantization", "level"), [((), "none", "note"), ((), "int8", "ok"), (("amx",), "none", "ok")]
)
def test_a_cpu_without_bf16_products_is_a_note_with_what_it_costs(monkeypatch, products, quantization, level):
    monkeypatch.setattr(checks.torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.setattr(checks.torch.cpu, "_is_amx_tile_supported", lambda: "amx" in products, raising=False)
    path = ExecutionPath(
        device=torch.device("cpu"), dtype=torch.bfloat16, is_prepacked=False, is_compiled=True,
        is_int8=quantization == "int8",
    )  # fmt: skip
    monkeypatch.setattr(checks, "quantized", lambda *_: path)
    finding = only(checks.check_cpu(settings()))
    assert finding.level == level
    if level == "note":
        assert "2.3 times" in finding.text
        assert "--quantization int8" in finding.fix


def test_the_cost_of_a_cpu_without_bf16_products_is_what_was_measured():
    rows = {}
    for line in (ROOT / "docs" / "performance.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("AMX", "torch, float32", "compiled, AVX512, bf16 weights", "compiled, AVX512, int8 weights"):
            rows[cells[0]] = [float(cell) for cell in cells[1:7]]  # passes of 1, 2, 4, 8, 16 rows and more
    bf16 = rows["compiled, AVX512, bf16 weights"]
    assert f"{bf16[4] / bf16[0]:.1f} times the time of one" in checks._WITHOUT_BF16
    assert f"{rows['torch, float32'][0] / bf16[0]:.1f} times as long" in checks._WITHOUT_BF16
    assert rows["AMX"][4] == pytest.approx(rows["AMX"][0], rel=0.05)
    assert f"{rows['compiled, AVX512, int8 weights'][0] / bf16[0]:.1f} of".removeprefix("0") in checks._ROUNDED


def test_what_is_not_needed_to_serve_is_a_note(monkeypatch):
    assert checks.check_extras(settings())[0].name == "extras"
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    findings = checks.check_extras(settings())
    assert [finding.text.split()[0] for finding in findings] == ["llguidance", "matplotlib", "pip"]
    assert {finding.level for finding in findings} == {"note"}


def test_every_warning_and_failure_names_a_fix():
    with pytest.raises(ValueError, match="must name a fix"):
        doctor.Finding(name="x", level="warning", text="slow")
    num_found = 0
    for module in (checks, doctor):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "Finding":
                continue
            given = {word.arg: word.value for word in node.keywords}
            if "level" in given and getattr(given["level"], "value", "") != "note":
                num_found += 1
                assert "fix" in given, ast.unparse(node)
    assert num_found > 15


def test_a_dtype_the_machine_has_not_and_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: False)
    assert only(checks.check_cpu(settings(model={"device": "cuda"}))).level == "failure"


def test_settings_that_this_model_or_machine_cannot_honour(model_folder, tmp_path):
    long = settings(model={"name": str(model_folder)}, engine={"max_model_len": 9999})
    assert "--max-model-len 512" in only(checks.check_model(long)).fix
    assert only(checks.check_draft(settings(model={"draft": str(tmp_path / "no")}))).level == "failure"
    assert only(checks.check_draft(settings(model={"draft": str(model_folder)}))).level == "ok"
    assert checks.check_draft(settings()) == []
    rounded = settings(model={"quantization": "int8", "dtype": "float32"})
    assert "int8 weights need" in only(checks.check_cpu(rounded)).text


def test_a_family_that_transformers_runs_is_a_note(neox_folder):
    assert "transformers runs" in only(checks.check_model(settings(model={"name": str(neox_folder)})), "note").text


def test_a_check_that_meets_what_it_did_not_expect_does_not_end_the_others(monkeypatch, model_folder):
    def check_bad(_):
        raise RuntimeError("odd")

    monkeypatch.setattr(checks, "ALL", (check_bad, checks.check_extras))
    findings = doctor.look(settings())
    assert ("bad", "warning") in [(finding.name, finding.level) for finding in findings]
    assert findings[-1].name == "extras"


def test_torch_that_cannot_be_imported_is_one_failure(monkeypatch):
    def missing(name):
        raise ImportError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", missing)
    findings = doctor.look(settings())
    assert [finding.name for finding in findings] == ["livedraft", "torch"]
    assert findings[1].level == "failure"
