"""GGUF files for other engines: a target's weights in one plain type, or another model's tensors in the place of the target's.

Both take the metadata, and so the tokenizer, of a GGUF file that is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from livedraft.models.pull import resolve_model
from livedraft.records import UserError

_COMPUTED = ("general.architecture", "general.file_type", "general.alignment")
"""Keys the writer makes itself, or that no longer hold."""
_FILE_TYPES = {"bf16": 32, "f32": 0}
"""llama.cpp's numbers for general.file_type."""


def export_gguf(model: str, file: Path, *, type: str) -> int:
    """Write a target's weights and return how many tensors there are.

    Raises UserError for anything but a GGUF file, or when the output cannot be written.
    """
    from gguf import GGUFReader, dequantize

    if type not in _FILE_TYPES:
        raise UserError(f"--type must be bf16 or f32, got {type!r}.")
    path = resolve_model(model)
    if path.suffix != ".gguf":
        raise UserError(f"{path} is no GGUF file; llama.cpp's own converter makes one of a Hugging Face folder.")
    if file.resolve() == path.resolve():
        raise UserError("The output must be another file than the model itself.")
    tensors = ((tensor.name, dequantize(tensor.data, tensor.tensor_type)) for tensor in GGUFReader(path).tensors)
    return write_gguf_like(path, file, tensors, type=type)


def write_gguf_like(
    source: Path, file: Path, tensors: Iterable[tuple[str, Any]], *, type: str = "bf16", num_layers: int | None = None
) -> int:
    """The source's metadata with these (name, float32 array) tensors; returns how many. Norms and biases stay float32, as
    everywhere. Whole or not at all. Raises UserError when the file cannot be written."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        num_tensors = _write(source, partial, tensors, type, num_layers)
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from error
    finally:
        partial.unlink(missing_ok=True)
    return num_tensors


def _write(source: Path, file: Path, tensors: Iterable[tuple[str, Any]], type: str, num_layers: int | None) -> int:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize

    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(file, architecture)
    writer.add_file_type(_FILE_TYPES[type])
    if "general.alignment" in reader.fields:
        writer.add_custom_alignment(int(reader.fields["general.alignment"].contents()))
    made = set(_COMPUTED)
    if num_layers is not None:
        writer.add_block_count(num_layers)
        made.add(f"{architecture}.block_count")
    for name, field in reader.fields.items():
        if name not in made and not name.startswith("GGUF."):
            kind, *sub_kind = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=sub_kind[0] if sub_kind else None)
    num_tensors = 0
    for name, values in tensors:
        num_tensors += 1
        if type == "bf16" and values.ndim > 1:
            data = quantize(values, GGMLQuantizationType.BF16)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_tensors
