"""What a figure was measured on, to stand beside it."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from livedraft.device import num_available_cores, versions


def hardware() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines[:30])}
    flags = found.get("flags", "").split()
    return {
        "cpu": found.get("model name") or platform.processor() or platform.machine(),
        "instructions": [
            name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if name in flags
        ],
        "cores": num_available_cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def run_record(*, data: Sequence[Path | str], seeds: Sequence[int]) -> dict[str, Any]:
    """Where figures come from, to be kept with them: `data` are the files they were measured on.

    Folders of this machine are left out, they mean nothing elsewhere: an absolute path is its last part alone.
    """
    found = hardware()
    instructions = ", ".join(found["instructions"])
    return {
        "command": shlex.join(["livedraft", *map(_without_folder, sys.argv[1:])]),
        "machine": found["gpu"] or f"{found['cores']} cores of {found['cpu']} ({instructions or 'no AVX2'})",
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(seeds),
        "data": ", ".join(_name_of_data(str(one)) for one in data),
        "versions": versions(),
    }


def _name_of_data(source: str) -> str:
    """Of a file or folder, or of `hub:DATASET:...`."""
    return source.split(":")[1] if source.startswith("hub:") else Path(source).stem


def _without_folder(argument: str) -> str:
    name, sign, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    prefix, colon, path = value.partition(":") if value.startswith("static:") else ("", "", value)
    is_path = path.startswith(("/", "./", "../", "~"))
    return f"{name}{sign}{prefix}{colon}{Path(path).name if is_path else path}"
