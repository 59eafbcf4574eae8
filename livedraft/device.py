"""Device, dtype and threads: the one place that looks at the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata

import torch

from livedraft.records import UserError


@dataclass(frozen=True, kw_only=True)
class ExecutionPath:
    """Where and how the models run; `description` is printed at start."""

    device: torch.device
    dtype: torch.dtype
    is_prepacked: bool
    """Weights are reordered once into oneDNN's blocked layout: bf16 at one row is about 1.5 times faster."""
    is_compiled: bool = False
    """A whole pass is one compiled function (`models/native.py`), for the models whose shape it knows."""
    is_graphed: bool = False
    """Steps of fixed shapes with padded rows, replayed as CUDA graphs (`models/static_decoder.py`); without a GPU the same
    steps run eagerly."""
    is_int8: bool = False
    """With the compiled step: weights are int8 with a scale an output."""
    is_int4: bool = False
    """With the compiled step: weights stay in the blocks of 4 and 8 bits that a GGUF file stores them in."""
    torch_dtype: torch.dtype | None = None
    """What a model that the compiled step does not know runs in, where that is another dtype."""

    @property
    def description(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        packed = ", compiled step" if self.is_compiled else ", oneDNN-prepacked weights" if self.is_prepacked else ""
        packed += ", int8 weights" if self.is_int8 else ", the file's own 4-bit weights" if self.is_int4 else ""
        if self.is_graphed:
            packed += ", CUDA graphs" if self.device.type == "cuda" else ", padded steps"
        return f"{self.device.type}, {kind}{packed}, {torch.get_num_threads()} thread(s)"


def cpu_has_bf16_instructions() -> bool:
    """True where bf16 products are native; elsewhere oneDNN emulates them and float32 is faster."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return any(
        getattr(torch.cpu, name, lambda: False)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


def choose_execution_path(dtype: str = "auto", device: str = "auto") -> ExecutionPath:
    """Pick the fastest path this machine has. `dtype` is auto, bfloat16 or float32; `device` is auto, cpu or cuda.

    Raises ValueError for another name, UserError for a device that is not there.
    """
    dtypes = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ValueError(f"dtype must be one of {', '.join(dtypes)}, got {dtype!r}.")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no CUDA device; use cpu, or install a CUDA build of torch.")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return ExecutionPath(
            device=torch.device("cuda"), dtype=dtypes[dtype] or torch.bfloat16, is_prepacked=False, is_graphed=True
        )
    has_bf16 = cpu_has_bf16_instructions()
    chosen = dtypes[dtype] or (torch.bfloat16 if has_bf16 else torch.float32)
    return ExecutionPath(device=torch.device("cpu"), dtype=chosen, is_prepacked=has_bf16 and chosen is torch.bfloat16)


def use_threads(num_threads: int) -> None:
    """Set torch's pool explicitly: two default pools on two cores slow each other tenfold."""
    torch.set_num_threads(max(1, num_threads))


def num_available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """On CUDA copied from pinned memory, so that the host does not wait for what the device is doing."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@contextmanager
def device_errors(device: torch.device) -> Iterator[None]:
    """What a GPU raises while models are opened, as a sentence for the user."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The GPU has too little free memory; lower max_num_seqs, max_model_len or kv_cache_gb, or end what else runs on it."
        ) from error
    except RuntimeError as error:
        if device.type != "cuda" or "CUDA" not in str(error):
            raise
        raise UserError(
            f"The CUDA device failed ({str(error).strip().splitlines()[0]}); check its driver, or set device to cpu."
        ) from error


def available_memory_bytes(device: torch.device | None = None) -> int:
    """What can be allocated, without swapping; half of the machine's memory where the system does not say."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        return kilobytes * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def versions() -> dict[str, str]:
    """Of the software that figures and weights depend on."""
    return {
        "livedraft": metadata.version("livedraft"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
