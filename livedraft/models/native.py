"""The decoder's pass as one compiled function: kernels/step.cpp, behind the same model step. (kernels/top.cpp, built with it,
is used by `top_tokens.py`.) Built once on this machine.

It needs an x86 CPU with AVX2 (AVX512, and its bf16 products, are used where they are), a C++ compiler, and shapes the kernels
know; where one is missing the torch decoder serves, and `unavailable_reason` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from dataclasses import replace
from pathlib import Path

import platformdirs
import torch

from livedraft.device import ExecutionPath
from livedraft.events import starting
from livedraft.models.blocks import Blocks
from livedraft.models.config import ModelConfig
from livedraft.models.decoder import (
    Decoder,
    DecoderWeights,
    GatedLinear,
    Linear,
    LinearKinds,
    PackedGatedLinear,
    PackedLinear,
)
from livedraft.models.graphs import capture_on
from livedraft.models.static_decoder import StaticDecoder
from livedraft.models.step import StepOutput
from livedraft.records import UserError

_SOURCES = sorted((Path(__file__).parent / "kernels").glob("*.cpp"))
_HEADERS = sorted((Path(__file__).parent / "kernels").glob("*.hpp"))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17", "-ffp-contract=off")
"""No product is fused with a sum but where the sources say so. Left to the compiler it depends on the CPU it tunes for and
on the shape of each loop: on an EPYC a row's last bits depended on how many rows a pass had."""
_HEAD_WIDTHS = (32, 64, 96, 128)
_LARGEST_INT8 = 127.0


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("blocks", "scales", "bias")),
        ("num_outputs", c_int),
        ("num_inputs", c_int),
        ("block_bits", c_int),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm", "query_norm", "key_norm")),
        *((name, _Matrix) for name in ("query_key_value", "attention_output", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


_INTS = ("width", "feed_forward_width", "num_heads", "num_kv_heads", "head_width", "num_layers", "max_length")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int) for name in _INTS),
        ("norm_eps", c_float),
        ("embedding", c_void_p),
        ("layers", POINTER(_Layer)),
        ("final_norm", c_void_p),
        ("head", _Matrix),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


# --- building -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The compiled kernels, or the reason why there are none."""
    wanted = os.environ.get("LIVEDRAFT_KERNELS", "auto")
    if wanted not in ("auto", "avx512", "avx2", "torch"):
        raise UserError(f"LIVEDRAFT_KERNELS is {wanted!r}; give auto, avx512, avx2 or torch.")
    if wanted == "torch":
        return "switched off by LIVEDRAFT_KERNELS=torch"
    if platform.machine().lower() not in ("x86_64", "amd64") or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return "this CPU has no AVX2"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return "there is no C++ compiler (g++)"
    try:
        library = ctypes.CDLL(str(_built(compiler, (*_FLAGS, *_instruction_flags(wanted)))))
        if not library.livedraft_may_run():  # the system keeps AMX to itself
            library = ctypes.CDLL(str(_built(compiler, (*_FLAGS, *_instruction_flags("avx512")))))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        return f"the kernels could not be built: {output.strip().splitlines()[-1] if output.strip() else error}"
    library.livedraft_super_block.restype = c_int
    library.livedraft_workspace.restype = c_void_p
    library.livedraft_free_workspace.argtypes = (c_void_p,)
    for pack in (library.livedraft_pack_bf16, library.livedraft_pack_int8):
        pack.argtypes = (c_void_p, POINTER(c_int), c_int, c_int, c_void_p, c_int)
    library.livedraft_pack_blocks.argtypes = (
        c_void_p, c_void_p, c_void_p, POINTER(c_int), c_int, c_int, c_int, c_void_p, c_int,
    )  # fmt: skip
    library.livedraft_block_bytes.restype = library.livedraft_int8_bytes.restype = c_int64
    library.livedraft_best.argtypes = (c_int, POINTER(c_void_p), c_int, c_void_p, c_void_p, c_int)
    library.livedraft_top.argtypes = (
        c_int, POINTER(c_void_p), POINTER(c_int), c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int,
    )  # fmt: skip
    library.livedraft_step.argtypes = (
        POINTER(_Model), c_void_p, c_int, POINTER(c_int), POINTER(c_int), POINTER(c_int), c_int, POINTER(c_int), c_void_p,
        c_int,
    )  # fmt: skip
    return library


def _instruction_flags(wanted: str) -> tuple[str, ...]:
    if wanted == "avx2":
        return ("-mno-avx512f",)
    without_tiles = ("-DLIVEDRAFT_NO_TILES",) if wanted == "avx512" else ()
    # Said apart: older compilers do not take it from -march=native.
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return (*(("-mavx512bf16",) if has_bf16 else ()), *without_tiles)


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """In the user's cache, by what it was made of. Built under another name and renamed: two processes may start at once."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = [path.read_text(encoding="utf-8") for path in (*_SOURCES, *_HEADERS)]
    parts = (texts, flags, version, torch.__version__, _openmp_libraries(), _cpu_name())
    made_of = repr(parts)
    folder = platformdirs.user_cache_path("livedraft") / "kernels"
    path = folder / f"step-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    starting("Compiling the step for this CPU, once: a minute or less ...")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        library_path = Path(made) / path.name
        objects = [Path(made) / f"{source.stem}.o" for source in _SOURCES]
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=True, timeout=300)
        for source, object_path in zip(_SOURCES, objects, strict=True):
            run([compiler, *flags, "-c", str(source), "-o", str(object_path)])
        # torch's own OpenMP library, not the system's: a second pool of threads would fight the first for the cores.
        run([compiler, "-shared", "-o", str(library_path), *map(str, objects), *map(str, _openmp_libraries())])
        os.replace(library_path, path)
    return path


def _openmp_libraries() -> list[Path]:
    root = Path(torch.__file__).parent
    found = [*(root / "lib").glob("libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    if not found:
        raise OSError("torch brings no OpenMP library of GNU's")
    return found[:1]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return "".join(line for line in lines[:30] if line.startswith(("model name", "flags")))


def kernels() -> ctypes.CDLL | None:
    """Built at the first call, where they can be."""
    library = _library()
    return library if isinstance(library, ctypes.CDLL) else None


def unavailable_reason(config: ModelConfig | None = None) -> str | None:
    """Why the kernels cannot run here, or not this shape; None when they can."""
    library = _library()
    if isinstance(library, str):
        return library
    if config is None:
        return None
    half = library.livedraft_super_block() // 2
    fits = config.head_width in _HEAD_WIDTHS and config.width % 16 == 0 and config.feed_forward_width % half == 0
    return None if fits else "the kernels do not know this model's shape"


def with_kernels(path: ExecutionPath, dtype: str = "auto") -> ExecutionPath:
    """The same path, with the compiled step where this machine can have it; `dtype` is what the user asked for. The step widens
    bf16 itself: with "auto" it runs in bf16 on CPUs without bf16 products too."""
    if path.device.type != "cpu" or unavailable_reason() is not None:
        return path
    if path.dtype is torch.bfloat16:
        return replace(path, is_compiled=True)
    return replace(path, is_compiled=True, dtype=torch.bfloat16, torch_dtype=path.dtype) if dtype == "auto" else path


def fitted(path: ExecutionPath, config: ModelConfig | None) -> ExecutionPath:
    """The path as a model of this shape can have it; None is a model that transformers runs."""
    if not path.is_compiled or (config is not None and unavailable_reason(config) is None):
        return path
    return replace(path, is_compiled=False, is_int8=False, is_int4=False, dtype=path.torch_dtype or path.dtype)


def quantized(path: ExecutionPath, quantization: str) -> ExecutionPath:
    """The path with "int8" or "int4" weights, with none, or with "auto": int8 where it can be had. Raises UserError where they
    cannot."""
    if quantization not in ("auto", "none", "int8", "int4"):
        raise ValueError(f"quantization must be none, int8 or int4, got {quantization!r}.")
    if quantization in ("int8", "int4") and not path.is_compiled:
        reason = unavailable_reason() or f"dtype is {str(path.dtype).removeprefix('torch.')} on {path.device.type}"
        raise UserError(f"{quantization} weights need the compiled bf16 step, which is not there: {reason}.")
    if quantization == "int4":
        return replace(path, is_int4=True)
    return replace(path, is_int8=path.is_compiled and quantization != "none")


# --- weights --------------------------------------------------------------------------------------------------------


def _super_block() -> int:
    """Outputs of a super-block of packed weights; in a gated one half are gates, and their ups follow."""
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    return int(library.livedraft_super_block())


class _Packed:
    """A matrix in the kernels' layout: output i is row order[i] of `weight`; bf16, int8 with a scale an output, or blocks.
    Activations enter an int8 product as 8 bits too, with a scale for each 32."""

    def __init__(
        self, weight: torch.Tensor | Blocks, order: torch.Tensor, bias: torch.Tensor | None = None, *, is_int8: bool
    ) -> None:
        self._shape = len(order), weight.shape[1]
        self._scales, self._block_bits = None, 0
        self._bias = None if bias is None else self._padded(bias[order].float())
        order = order.to(torch.int32).contiguous()
        if isinstance(weight, Blocks):
            self._pack_blocks(weight, order)
        else:
            self._pack(weight, order, is_int8)

    def _pack(self, weight: torch.Tensor, order: torch.Tensor, is_int8: bool) -> None:
        library = _library()
        assert isinstance(library, ctypes.CDLL)
        pack = library.livedraft_pack_bf16
        if is_int8:
            pack = library.livedraft_pack_int8
            largest = weight.float().abs().amax(1).clamp(min=1e-12)
            self._scales = self._padded((largest / _LARGEST_INT8)[order])
            weight = (weight.float() * (_LARGEST_INT8 / largest)[:, None]).round().to(torch.int8)
            self.blocks = torch.zeros(library.livedraft_int8_bytes(*self._shape), dtype=torch.uint8)
        else:
            weight = weight.to(torch.bfloat16)
            self.blocks = torch.zeros(self._num_padded * weight.shape[1], dtype=torch.bfloat16)
        weight = weight.contiguous()
        pack(
            weight.data_ptr(), ctypes.cast(order.data_ptr(), POINTER(c_int)), *self._shape, self.blocks.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    def _pack_blocks(self, weight: Blocks, order: torch.Tensor) -> None:
        library = _library()
        assert isinstance(library, ctypes.CDLL)
        self._block_bits = weight.num_bits
        self.blocks = torch.zeros(library.livedraft_block_bytes(*self._shape, self._block_bits), dtype=torch.uint8)
        parts = [part.contiguous() for part in (weight.levels_OI, weight.scales_OB, weight.offsets_OB)]
        library.livedraft_pack_blocks(
            *(part.data_ptr() for part in parts), ctypes.cast(order.data_ptr(), POINTER(c_int)), *self._shape,
            self._block_bits, self.blocks.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    @property
    def _num_padded(self) -> int:
        block = _super_block()
        return -(-self._shape[0] // block) * block

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(self._num_padded)
        padded[: len(values)] = values
        return padded

    def struct(self) -> _Matrix:
        scales, bias = (None if one is None else one.data_ptr() for one in (self._scales, self._bias))
        return _Matrix(self.blocks.data_ptr(), scales, bias, *self._shape, self._block_bits)


class NativeLinear(Linear):
    """Packed for the kernels; only `NativeDecoder` can run it."""

    is_int8 = False

    def __init__(self, weight: torch.Tensor | Blocks, bias: torch.Tensor | None = None) -> None:
        self.packed = _Packed(weight, torch.arange(weight.shape[0]), bias, is_int8=self.is_int8)
        self.weight, self.bias, self.num_outputs = self.packed.blocks, bias, weight.shape[0]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError("packed weights are run by the compiled step")


class NativeGatedLinear(GatedLinear):
    """Gates and ups of a feed-forward in turn, half a super-block of each, so that one thread has both of an output."""

    is_int8 = False

    def __init__(self, weight: torch.Tensor | Blocks) -> None:
        half = weight.shape[0] // 2
        rows = torch.arange(half).view(-1, _super_block() // 2)
        self.packed = _Packed(weight, torch.stack([rows, rows + half], dim=1).flatten(), is_int8=self.is_int8)
        self.weight = self.packed.blocks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("packed weights are run by the compiled step")


class Int8Linear(NativeLinear):
    is_int8 = True


class Int8GatedLinear(NativeGatedLinear):
    is_int8 = True


def linear_kinds(path: ExecutionPath, config: ModelConfig) -> LinearKinds:
    """How a model of this shape lies in memory on this path."""
    if path.is_compiled and unavailable_reason(config) is None:
        return (Int8Linear, Int8GatedLinear) if path.is_int8 else (NativeLinear, NativeGatedLinear)
    return (PackedLinear, PackedGatedLinear) if path.is_prepacked else (Linear, GatedLinear)


# --- the decoder ----------------------------------------------------------------------------------------------------


class NativeDecoder(Decoder):
    """`Decoder` with a compiled forward pass. Everything it points to is kept alive here."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert dtype == torch.bfloat16 and device.type == "cpu"
        super().__init__(config, weights, num_slots=num_slots, max_length=max_length, dtype=dtype, device=device)
        library = _library()
        assert isinstance(library, ctypes.CDLL)
        self._library_ = library
        self._kept: list[torch.Tensor] = []
        half = config.head_width // 2
        # The torch decoder's table is bf16 and has both halves; here float32 and the first one.
        table = type(self.rotary)(config, max_length, torch.float32, device)
        cos, sin = table.cos_T1E[:, 0, :half], -table.signed_sin_T1E[:, 0, :half]
        embedding_VD = weights.embedding_VD.to(torch.bfloat16).contiguous()
        self._kept.append(embedding_VD)
        assert isinstance(weights.head, NativeLinear)
        self._num_logits = weights.head.num_outputs
        self._layers = (_Layer * len(weights.layers))(*(self._layer(index) for index in range(len(weights.layers))))
        self._model = _Model(
            config.width, config.feed_forward_width, config.num_heads, config.num_kv_heads, config.head_width,
            len(weights.layers), max_length, config.norm_eps, embedding_VD.data_ptr(), self._layers,
            self._floats(weights.final_norm_D), weights.head.packed.struct(), self._floats(cos), self._floats(sin),
        )  # fmt: skip
        self._workspace = library.livedraft_workspace()

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()

    def _layer(self, index: int) -> _Layer:
        layer = self.weights.layers[index]
        matrices = (layer.query_key_value, layer.attention_output, layer.gate_up, layer.down)
        norms = (layer.attention_norm_D, layer.feed_forward_norm_D, layer.query_norm_E, layer.key_norm_E)
        return _Layer(
            *(self._floats(norm) for norm in norms),
            *(matrix.packed.struct() for matrix in matrices),  # type: ignore[attr-defined]  # all are native ones
            self.cache.keys[index].data_ptr(),
            self.cache.values[index].data_ptr(),
        )

    def forward(
        self, token_ids_N: list[int], positions_N: list[int], slots_N: list[int], logit_rows_R: list[int]
    ) -> StepOutput:
        N, R = len(token_ids_N), len(logit_rows_R)
        assert N == len(positions_N) == len(slots_N) > 0
        assert max(positions_N) < self.max_length, "position past the cache"
        assert min(token_ids_N) >= 0 and max(token_ids_N) < self.config.vocabulary_size
        logits_RV = torch.empty(R, self._num_logits)
        ints = c_int * N
        self._library_.livedraft_step(
            self._model, self._workspace, N, ints(*token_ids_N), ints(*positions_N), ints(*slots_N), R,
            (c_int * R)(*logit_rows_R), logits_RV.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return StepOutput(logits_RV=logits_RV)

    def __del__(self) -> None:
        workspace = getattr(self, "_workspace", None)
        if workspace:
            self._library_.livedraft_free_workspace(workspace)


def make_decoder(
    config: ModelConfig, weights: DecoderWeights, path: ExecutionPath, *, num_slots: int, max_length: int
) -> Decoder:
    """The decoder that can run these weights, with a cache of its own."""
    if path.is_graphed:
        return StaticDecoder(
            config, weights, num_slots=num_slots, max_length=max_length, dtype=path.dtype, device=path.device,
            capture=capture_on(path.device),
        )  # fmt: skip
    kind = NativeDecoder if isinstance(weights.head, NativeLinear) else Decoder
    return kind(config, weights, num_slots=num_slots, max_length=max_length, dtype=path.dtype, device=path.device)
