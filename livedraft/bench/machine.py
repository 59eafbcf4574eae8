"""What a figure was measured on, to stand beside it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from livedraft.device import num_available_cores


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


def versions() -> dict[str, str]:
    return {
        "livedraft": metadata.version("livedraft"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
