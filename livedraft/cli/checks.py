"""What `livedraft doctor` looks at, one function a subject. Each answers with findings and changes nothing."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from math import prod
from pathlib import Path

import torch

from livedraft.cli.doctor import Finding
from livedraft.device import available_memory_bytes, choose_execution_path, num_available_cores
from livedraft.drafts.database import DATABASE_NAME, DATABASE_SCHEMA_VERSION, read_controls, read_status
from livedraft.engine.slots import within_model
from livedraft.models.load import expected_shapes, read_config
from livedraft.models.native import fitted, quantized, unavailable_reason, with_kernels
from livedraft.models.open import is_native
from livedraft.models.pull import DEFAULT_MODEL, MODELS, is_hub_name, is_whole, models_folder, resolve_model
from livedraft.records import UserError
from livedraft.server.local import state_folder
from livedraft.settings import Settings

_INDEX_OF_CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
_COMPILER_COMMANDS = {
    "apt-get": "sudo apt-get install g++",
    "dnf": "sudo dnf install gcc-c++",
    "zypper": "sudo zypper install gcc-c++",
    "pacman": "sudo pacman -S gcc",
    "apk": "sudo apk add g++",
}
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre")
_BUSY_SHARE = 0.5
"""Of the cores in use before anything is served: from here on the figures of speed are somebody else's too."""
_WITHOUT_BF16 = (
    "one request is served no slower for want of bf16 products, many at once are: 16 rows took 2.3 times the time of one, with "
    "AMX as long as one; without the compiled step one row takes 2.4 times as long too (docs/performance.md)"
)
_ROUNDED = "livedraft serve --quantization int8  # .6 of the time of one row there; answers differ a little"
_GIB = 2**30


# --- the machine ----------------------------------------------------------------------------------------------------


def check_torch(_: Settings) -> list[Finding]:
    """Which build, and whether it is the one this machine wants."""
    version, cuda = torch.__version__, torch.version.cuda
    plain_version = version.split("+")[0]
    build = f"built for CUDA {cuda}" if cuda else "built for CPUs"
    has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        return [Finding(name="torch", text=f"{version}, {build}")]
    if has_gpu and not cuda:
        fix = f"python -m pip install --force-reinstall --index-url https://pypi.org/simple torch=={plain_version}"
        text = f"{version}, {build}, but this machine has an NVIDIA GPU, which it cannot use"
        return [Finding(name="torch", level="warning", text=text, fix=fix)]
    if has_gpu:
        text = f"{version}, {build}, but it sees no GPU: the driver does not answer, or is too old for this build"
        return [Finding(name="torch", level="warning", text=text, fix="nvidia-smi")]
    if cuda:
        fix = f"python -m pip install --force-reinstall --index-url {_INDEX_OF_CPU_BUILDS} torch=={plain_version}"
        text = f"{version}, {build}, and there is no GPU: the CPU build does the same in a tenth of the disk space"
        return [Finding(name="torch", level="note", text=text, fix=fix)]
    return [Finding(name="torch", text=f"{version}, {build}")]


def check_gpu(_: Settings) -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding(name="gpu", text="none; the CPU serves")]
    free, total = torch.cuda.mem_get_info()
    text = f"{torch.cuda.get_device_name()}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free; it serves"
    if free < total / 4:
        fix = "nvidia-smi"
        return [Finding(name="gpu", level="warning", text=f"{text}, though others hold most of its memory", fix=fix)]
    return [Finding(name="gpu", text=text)]


def check_cpu(settings: Settings) -> list[Finding]:
    """Instructions, and what the models will run in."""

    def has(name: str) -> bool:
        return bool(getattr(torch.cpu, name, lambda: False)())

    capability = torch.backends.cpu.get_cpu_capability()
    has_bf16, has_amx = has("_is_avx512_bf16_supported"), has("_is_amx_tile_supported")
    found = ", ".join([capability, "bf16 products" if has_bf16 else "no bf16 products", "AMX" if has_amx else "no AMX"])
    try:
        path = with_kernels(choose_execution_path(settings.model.dtype, settings.model.device), settings.model.dtype)
        path = quantized(path, settings.model.quantization)
    except (ValueError, UserError) as error:
        fix = "livedraft config show  # [model] dtype, device, quantization; left out, each is what this machine has"
        return [Finding(name="cpu", level="failure", text=str(error), fix=fix)]
    dtype = str(path.dtype).removeprefix("torch.")
    text = f"{platform.machine()}, {found}; models run in {dtype}"
    if path.device.type == "cpu" and not path.is_compiled and not path.is_prepacked and path.dtype is torch.bfloat16:
        fix = "livedraft serve --dtype float32"
        return [Finding(name="cpu", level="warning", text=f"{text}, which this CPU has to imitate", fix=fix)]
    is_rounded = path.is_int8 or path.is_int4
    if path.device.type == "cpu" and not has_bf16 and not has_amx and not is_rounded:
        return [Finding(name="cpu", level="note", text=f"{text}; {_WITHOUT_BF16}", fix=_ROUNDED)]
    return [Finding(name="cpu", text=text)]


def check_kernels(settings: Settings) -> list[Finding]:
    """The compiled step; looking builds it, once."""
    reason = unavailable_reason()
    if reason is None:
        return [Finding(name="kernels", text="the compiled step is built and loads")]
    slower = f"{reason}; torch's own kernels serve, at half the speed or less"
    if "LIVEDRAFT_KERNELS" in reason:
        return [Finding(name="kernels", level="warning", text=slower, fix="unset LIVEDRAFT_KERNELS")]
    if "compiler" in reason or "built" in reason:
        commands = (command for tool, command in _COMPILER_COMMANDS.items() if shutil.which(tool))
        fix = next(commands, "install a C++ compiler with OpenMP")
        return [Finding(name="kernels", level="warning", text=slower, fix=fix)]
    return [Finding(name="kernels", level="note", text=slower)]


def check_threads(settings: Settings) -> list[Finding]:
    """More threads than there are cores to run them, or cores that others use, cost more than they give."""
    cores = num_available_cores()
    asked = settings.model.num_threads or cores
    quota = _cpu_quota()
    findings = [Finding(name="threads", text=f"{asked}, on {cores} cores this process may use")]
    if quota is not None and quota < asked:
        text = f"{asked}, but this container may use {quota:g} cores' time: its threads will wait for each other"
        fix = f"livedraft serve --threads {max(1, int(quota))}"
        findings = [Finding(name="threads", level="warning", text=text, fix=fix)]
    elif asked > cores:
        text = f"{asked} are asked for and there are {cores} cores"
        findings = [Finding(name="threads", level="warning", text=text, fix=f"livedraft serve --threads {cores}")]
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        text = "OMP_WAIT_POLICY=PASSIVE puts threads to sleep between two products: about two thirds of the speed"
        findings.append(Finding(name="threads", level="warning", text=text, fix="unset OMP_WAIT_POLICY"))
    load = os.getloadavg()[0]
    if load > _BUSY_SHARE * cores:
        text = f"others kept {load:.1f} of {cores} cores busy in the last minute; speed and learning share what is left"
        findings.append(Finding(name="load", level="warning", text=text, fix="top"))
    return findings


def _cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Cores' worth of time a container may use; None where there is no limit."""
    try:
        quota, period = file.read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


# --- what is served -------------------------------------------------------------------------------------------------


def check_model(settings: Settings) -> list[Finding]:
    """There, whole, of a known kind, and small enough."""
    name = settings.model.name
    try:
        path = resolve_model(name)
    except UserError as error:
        can_be_had = name in MODELS or is_hub_name(name)
        fix = f"livedraft pull {name}" if can_be_had else f"livedraft serve {DEFAULT_MODEL}  # or the path of a model"
        return [Finding(name="model", level="failure", text=str(error), fix=fix)]
    if name in MODELS and not is_whole(name):
        text = f"{path} is not the file it should be (size or checksum)"
        return [Finding(name="model", level="failure", text=text, fix=f"livedraft pull {name}")]
    if not is_native(path):
        device = choose_execution_path(settings.model.dtype, settings.model.device).device
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        text = f"{path}, of a family that transformers runs: one request at a time, and drafts of its own layers are not made"
        return [Finding(name="model", level="note", text=text), *_memory(num_bytes, device)]
    config = read_config(path)
    try:
        within_model(settings.engine, config.max_positions)
    except ValueError as error:
        fix = f"livedraft serve --max-model-len {config.max_positions}"
        return [Finding(name="model", level="failure", text=str(error), fix=fix)]
    run_path = with_kernels(choose_execution_path(settings.model.dtype, settings.model.device), settings.model.dtype)
    num_parameters = sum(prod(shape) for shape in expected_shapes(config).values())
    findings = [Finding(name="model", text=f"{name}, {num_parameters / 1e6:.0f} M parameters, at {path}")]
    if run_path.is_compiled and (reason := unavailable_reason(config)) is not None:
        findings = [Finding(name="model", level="note", text=f"{findings[0].text}; {reason}, torch's serve")]
    return findings + _memory(num_parameters * fitted(run_path, config).dtype.itemsize, run_path.device)


def _memory(num_bytes: int, device: torch.device) -> list[Finding]:
    available = available_memory_bytes(device)
    where = " on the GPU" if device.type == "cuda" else ""
    text = f"{available / _GIB:.1f} GiB free{where}, weights take {num_bytes / _GIB:.2f}; requests get up to half of the rest"
    if num_bytes > available:
        look = "nvidia-smi" if device.type == "cuda" else "free -h"
        fix = f"{look}  # close something, or name a smaller model"
        return [Finding(name="memory", level="failure", text=text, fix=fix)]
    if num_bytes > available / 2:
        fix = "livedraft serve --max-num-seqs 2 --max-model-len 1024"
        return [Finding(name="memory", level="warning", text=f"{text}, which is little", fix=fix)]
    return [Finding(name="memory", text=text)]


def check_draft(settings: Settings) -> list[Finding]:
    """The one that is asked for by name is there; whether it fits the target is seen when both are loaded."""
    draft = settings.model.draft
    if draft in ("auto", "none", "untrained"):
        return []
    if Path(draft).exists() or (state_folder(settings) / "drafts" / draft).exists():
        return [Finding(name="draft", text=draft)]
    text = f"there is no draft {draft!r}, neither as a folder or file nor as a version in {state_folder(settings)}"
    return [Finding(name="draft", level="failure", text=text, fix="livedraft drafts list")]


# --- where it is kept, and where it listens -------------------------------------------------------------------------


def check_state(settings: Settings) -> list[Finding]:
    """The folder of drafts and traces: usable, free, readable by this livedraft."""
    if not settings.model.learn and settings.model.state is None:
        return [Finding(name="state", text="none is used: learning is off and nothing is stored")]
    folder = state_folder(settings)
    other = "livedraft serve --state FOLDER"
    existing = _existing(folder)
    if not _takes_files(existing):
        text = f"{folder} cannot be written ({existing} is no folder that takes files)"
        return [Finding(name="state", level="failure", text=text, fix=other)]
    kind = _filesystem(existing)
    findings = []
    if kind in _NETWORK_FILESYSTEMS:
        text = f"{folder} lies on a network filesystem ({kind}), where locks and the database cannot be trusted"
        findings.append(Finding(name="state", level="warning", text=text, fix=other))
    if not folder.exists():
        return findings or [Finding(name="state", text=f"{folder} will be made at the first start")]
    if _is_locked(folder / "lock"):
        text = f"{folder} is used by a livedraft that runs now; a second one needs its own"
        return [*findings, Finding(name="state", level="failure", text=text, fix=other)]
    if not (folder / DATABASE_NAME).exists():
        return findings or [Finding(name="state", text=f"{folder}, nothing in it yet")]
    schema = _schema_version(folder / DATABASE_NAME)
    if schema > DATABASE_SCHEMA_VERSION:
        text = f"{folder} was written by a newer livedraft (schema {schema}, this one reads {DATABASE_SCHEMA_VERSION})"
        return [*findings, Finding(name="state", level="failure", text=text, fix=other)]
    findings = findings or [Finding(name="state", text=f"{folder}, not in use")]
    if schema == DATABASE_SCHEMA_VERSION:  # an older one is migrated by whoever opens it: not by looking
        findings += _learning(folder)
    return findings


def _learning(folder: Path) -> list[Finding]:
    findings = []
    where = f" --state {folder}"
    if read_controls(folder)["paused"]:
        fix = f"livedraft learn resume{where}"
        findings.append(Finding(name="learning", level="note", text="training was paused by an operator", fix=fix))
    problem = read_status(folder, "trainer").get("last_problem")
    if problem:
        fix = f"livedraft learn status{where}"
        findings.append(Finding(name="learning", level="warning", text=f"the trainer met: {problem}", fix=fix))
    return findings


def check_disk(settings: Settings) -> list[Finding]:
    """Room for what will be written: traces up to their limit, versions, and a model that is not here yet."""
    findings = []
    if settings.model.learn and not settings.learning.memory_only:
        folder = state_folder(settings)
        free = shutil.disk_usage(_existing(folder)).free
        limit = settings.learning.max_store_gb * _GIB
        text = f"{free / _GIB:.1f} GiB free for {folder}, traces take up to {settings.learning.max_store_gb:g}"
        if free < limit:
            text += "; on a full disk traces are dropped and training waits, answers are not touched"
            fix = f"LIVEDRAFT_LEARNING__MAX_STORE_GB={max(0.1, free / 2 / _GIB):.1f} livedraft serve"
            findings.append(Finding(name="disk", level="warning", text=text, fix=fix))
        else:
            findings.append(Finding(name="disk", text=text))
    folder = models_folder()
    free = shutil.disk_usage(_existing(folder)).free
    if free < _GIB:
        text = f"{free / _GIB:.2f} GiB free for models in {folder}"
        findings.append(Finding(name="disk", level="warning", text=text, fix="LIVEDRAFT_MODELS=FOLDER livedraft pull"))
    return findings


def check_address(settings: Settings) -> list[Finding]:
    """Whether it can be listened on, and who could then ask."""
    server = settings.server
    shown = f"{server.host}:{server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return [_address_failure(server.host, server.port, error)]
    is_local = server.host in ("127.0.0.1", "localhost", "::1")
    if not is_local and not server.api_keys:
        text = f"{shown} is free, and open to the network without a key"
        return [Finding(name="address", level="warning", text=text, fix="livedraft serve --api-key KEY")]
    return [Finding(name="address", text=f"{shown} is free" if server.port else "a free port will be taken")]


def _address_failure(host: str, port: int, error: OSError) -> Finding:
    text = f"{host}:{port} cannot be listened on: {error.strerror or error}"
    if status := _livedraft_at(host, port):
        text = f"a livedraft answers on {host}:{port} already ({status}); a second one needs another port"
    return Finding(name="address", level="failure", text=text, fix="livedraft serve --port 0  # takes a free one")


def _livedraft_at(host: str, port: int) -> str | None:
    """What /health of a livedraft there says."""
    import httpx

    try:
        answer = httpx.get(f"http://{host}:{port}/health", timeout=2.0).json()
        return str(answer["status"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None


def check_extras(_: Settings) -> list[Finding]:
    """What is not needed to serve."""
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if not missing:
        return [Finding(name="extras", text=", ".join(_EXTRAS))]
    return [
        Finding(name="extras", level="note", text=f"{name} is not installed; {text}", fix=fix)
        for name, (text, fix) in _EXTRAS.items()
        if name in missing
    ]


_EXTRAS = {
    "llguidance": (
        "requests with a JSON schema (response_format) are refused",
        "python -m pip install 'livedraft[structured]'",
    ),
    "matplotlib": ("--plot of `livedraft bench` is refused", "python -m pip install 'livedraft[bench]'"),
    "pip": ("`livedraft pull` cannot fetch models", "python -m ensurepip  # or, made by uv: uv pip install pip"),
}
"""Module -> what is missed without it, and the command that installs it."""


# --- looking at folders ---------------------------------------------------------------------------------------------


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    path = path.expanduser().absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _takes_files(folder: Path) -> bool:
    """Asked by making one that is gone at once; what the folder's mode says is not the whole truth."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _filesystem(path: Path) -> str:
    """The kind of the filesystem it lies on; empty where the system does not say."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mounts = [(fields[1], fields[2]) for line in lines if len(fields := line.split()) > 2]
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount[0])]
    return max(around, key=lambda mount: len(mount[0]))[1] if around else ""


def _is_locked(lock: Path) -> bool:
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _schema_version(database: Path) -> int:
    """Read without changing anything. Raises UserError for what is no database."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=2.0)) as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.OperationalError:  # locked just now
        return DATABASE_SCHEMA_VERSION
    except sqlite3.DatabaseError:
        return 0  # damaged: `serve` sets it aside and rebuilds it


ALL: tuple[Callable[[Settings], list[Finding]], ...] = (
    check_torch, check_gpu, check_cpu, check_kernels, check_threads, check_model, check_draft, check_state, check_disk,
    check_address, check_extras,
)  # fmt: skip
