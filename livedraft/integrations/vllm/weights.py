"""New draft weights into a running vLLM worker: fetched and checked while the engine runs, loaded while it is paused.

`Stage` does all that can be refused (download, checksum, names, shapes, types, target) on a thread of its own and touches
no engine; `swap` then loads from memory. An exception after `swap` has begun leaves a draft nobody knows: the engine is dead.

Runs inside vLLM: standard library, torch, safetensors and `wire` only; vLLM itself is imported where it is used.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from livedraft.integrations.vllm.wire import (
    BadWeightsError,
    WeightsManifest,
    check_manifest,
    read_manifest,
)

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 60.0
_PROBE_TOLERANCE = 0.02
"""Relative; bf16 products of a few hundred terms summed in another order stay well below."""


class SwapError(RuntimeError):
    """The draft that is resident is not what was sent: the engine must not go on drafting with it."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    version: str
    sha256: str
    tensors: dict[str, torch.Tensor]


class Stage:
    """One file at a time, on a thread of its own."""

    def __init__(self, expected: WeightsManifest) -> None:
        self._expected = expected
        self._lock = threading.Lock()
        self._asked = ""
        self.staged: Staged | None = None
        self.problem = ""

    def begin(self, *, version: str, source: str, sha256: str, token: str) -> None:
        """`source` is a path, or a URL of the parent's. A file being staged is forgotten."""
        with self._lock:
            self._asked, self.staged, self.problem = version, None, ""
        threading.Thread(
            target=self._run, args=(version, source, sha256, token), name="livedraft-stage", daemon=True
        ).start()

    def _run(self, version: str, source: str, sha256: str, token: str) -> None:
        try:
            staged, problem = self._staged(version, source, sha256, token), ""
        except (BadWeightsError, OSError) as error:
            staged, problem = None, str(error)
        except Exception as error:
            staged, problem = None, f"{type(error).__name__}: {error}"
        with self._lock:
            if self._asked == version:
                self.staged, self.problem = staged, problem

    def _staged(self, version: str, source: str, sha256: str, token: str) -> Staged:
        with tempfile.TemporaryDirectory(prefix="livedraft-") as folder:
            path = Path(source)
            if source.startswith(("http://", "https://")):
                path = Path(folder) / "model.safetensors"
                _download(source, path, token)
            check_file(path, self._expected, sha256=sha256)
            tensors = load_file(path)
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise BadWeightsError(f"{name} holds values that are no numbers.")
        return Staged(version=version, sha256=sha256, tensors=tensors)

    def take(self, version: str) -> Staged:
        """Raises BadWeightsError when that version is not staged; the engine is untouched."""
        with self._lock:
            staged, self.staged = self.staged, None
        if staged is None or staged.version != version:
            raise BadWeightsError(f"Version {version} is not staged.")
        return staged


def _download(url: str, path: Path, token: str) -> None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response, path.open("wb") as file:
        while chunk := response.read(_CHUNK):
            file.write(chunk)


def check_file(path: Path, expected: WeightsManifest, *, sha256: str) -> None:
    """Raises BadWeightsError for anything but a whole file of the resident draft's own shape, trained for its target."""
    manifest = read_manifest(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise BadWeightsError(f"{path.name} does not match its checksum; it is damaged or not what was announced.")
    check_manifest(manifest, expected)


# --- into the engine ------------------------------------------------------------------------------------------------


def swap(worker: Any, staged: Staged) -> dict[str, Any]:
    """Load into the resident draft, between two steps of a paused engine. Returns what was verified.

    Raises SwapError, or whatever vLLM raises; the engine counts as dead then.
    """
    started = time.monotonic()
    draft = worker.get_draft_model()
    way = _load(worker, draft, staged)
    num_packed = repack(draft)
    verified = verify(draft, staged.tensors, is_whole=_world_size(worker) == 1)
    return {
        "version": staged.version, "sha256": staged.sha256, "way": way, "num_repacked": num_packed,
        "num_verified": verified, "seconds": round(time.monotonic() - started, 4),
    }  # fmt: skip


def prepare(worker: Any) -> None:
    """Before the first swap: its imports take most of a second on a busy machine, and requests would stand still."""
    from vllm.model_executor.model_loader import reload  # noqa: F401

    if hasattr(worker, "start_draft_weight_update"):
        _use_memory_engine(worker)


def _load(worker: Any, draft: torch.nn.Module, staged: Staged) -> str:
    """By vLLM's own draft weight update where this worker has one, else by the layerwise reload beneath it."""
    if hasattr(worker, "start_draft_weight_update") and _use_memory_engine(worker):
        worker.weight_transfer_engine.tensors = staged.tensors
        try:
            worker.start_draft_weight_update()
            worker.update_weights({})
            loaded = worker.weight_transfer_engine.loaded
            worker.finish_weight_update()
        finally:
            worker.weight_transfer_engine.tensors = {}
        way = "draft weight update"
    else:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(draft)
            loaded = draft.load_weights(iter(staged.tensors.items()))
            finalize_layerwise_reload(draft, worker.vllm_config.speculative_config.draft_model_config)
        way = "layerwise reload"
    missing = {name for name, _ in draft.named_parameters()} - set(loaded or ())
    missing = {name for name in missing if not name.startswith("lm_head") or "lm_head.weight" in staged.tensors}
    if missing:
        raise SwapError(f"vLLM did not load {sorted(missing)[0]}.")
    return way


def _use_memory_engine(worker: Any) -> bool:
    """Whether the worker's weight transfer engine is ours by now: one that somebody configured for other ends is left alone."""
    if worker.weight_transfer_engine is None:
        worker.weight_transfer_engine = _memory_engine_class()(worker)
    return type(worker.weight_transfer_engine).__name__ == "LivedraftWeights"


def _memory_engine_class() -> Any:
    """vLLM's documented extension point: where weights come from. Ours come from this process's memory."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class LivedraftWeights(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = update_info_cls = dict

        def __init__(self, worker: Any) -> None:
            super().__init__(None, worker.vllm_config, worker.device, worker.get_model())
            self.tensors: dict[str, torch.Tensor] = {}
            self.loaded: set[str] = set()

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            self.loaded = set(self.model.load_weights(iter(self.tensors.items())))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    return LivedraftWeights


def repack(draft: torch.nn.Module) -> int:
    """On CPU linear layers run on a packed copy. Where two modules share one weight (tied head and embedding), a reload renews
    the weight and leaves the other's copy as it was."""
    num_packed = 0
    for module in draft.modules():
        weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
        is_kept = isinstance(weight, torch.Tensor) and weight.numel() > 0
        if hasattr(module, "cpu_linear") and is_kept and method is not None:
            method.process_weights_after_loading(module)
            num_packed += 1
    return num_packed


@torch.inference_mode()
def verify(draft: torch.nn.Module, tensors: dict[str, torch.Tensor], *, is_whole: bool) -> int:
    """Ask the resident draft itself: embeddings and norms must be the file's, and each linear layer must answer a probe as
    the file's weights do. With tensor parallelism (not `is_whole`) a rank holds pieces, and only norms are compared. Returns
    how many modules were looked at. Raises SwapError."""
    num_verified = 0
    dtype = next(parameter.dtype for parameter in draft.parameters() if parameter.numel())  # that it computes in
    for name, module in draft.named_modules():
        parts = list(_parts_of(name, tensors))
        if not parts:
            continue
        weight = getattr(module, "weight", None)
        if parts[0].ndim == 1:
            assert weight is not None
            if not torch.equal(weight.to("cpu", parts[0].dtype), parts[0]):
                raise SwapError(f"{name} is not what was sent.")
        elif not is_whole:
            continue
        elif name.endswith("embed_tokens"):
            ids = torch.arange(0, len(parts[0]), max(1, len(parts[0]) // 64))
            found = module(ids.to(weight.device if weight is not None else "cpu")).cpu()
            if not torch.equal(found.to(parts[0].dtype), parts[0][ids]):
                raise SwapError(f"{name} is not what was sent.")
        else:
            _probe(name, module, torch.cat(parts), dtype)
        num_verified += 1
    return num_verified


def _parts_of(name: str, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The file's tensors that make up a module's weight: vLLM fuses some."""
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    stem, _, last = name.rpartition(".")
    for part in fused.get(last, (last,)):
        key = f"{stem}.{part}.weight" if stem else f"{part}.weight"
        if key in tensors:
            yield tensors[key]
        elif key == "lm_head.weight" and "model.embed_tokens.weight" in tensors:
            yield tensors["model.embed_tokens.weight"]


def _probe(name: str, module: torch.nn.Module, weight_OI: torch.Tensor, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    probe_1I = torch.randn(1, weight_OI.shape[1], generator=generator).to(dtype)
    expected_O = (probe_1I.float() @ weight_OI.float().T)[0]
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    method = getattr(module, "quant_method", None)
    assert method is not None, name
    found_O = method.apply(module, probe_1I.to(device), bias=None)[0].float().cpu()
    error = (found_O[: len(expected_O)] - expected_O).norm() / expected_O.norm()
    if not error < _PROBE_TOLERANCE:
        raise SwapError(f"{name} does not answer as the weights that were sent (off by {float(error):.3f}).")


def _world_size(worker: Any) -> int:
    return int(worker.vllm_config.parallel_config.world_size)
