"""A trainer's state on disk, whole or not at all: what online and offline training go on from after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from livedraft.drafts.registry import fsync_path


def write_checkpoint(path: Path, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
    """Under another name first. Raises OSError or SafetensorError, and what was there before stays."""
    temporary = path.with_suffix(".tmp")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            temporary,
            metadata={"counters": json.dumps(counters)},
        )
        fsync_path(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, counters). Raises FileNotFoundError without one; OSError, SafetensorError, KeyError, ValueError or TypeError
    for what is none."""
    with safe_open(path, framework="pt") as file:
        counters: dict[str, Any] = json.loads(file.metadata()["counters"])
        return {name: file.get_tensor(name) for name in file.keys()}, counters  # noqa: SIM118 - not a dict
