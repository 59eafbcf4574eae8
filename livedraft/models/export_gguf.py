"""A GGUF target's weights as they are served, in one plain type, so that other engines can run the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from livedraft.models.pull import resolve_model
from livedraft.records import UserError

_COMPUTED = (
    "GGUF.version",
    "GGUF.tensor_count",
    "GGUF.kv_count",
    "general.architecture",
    "general.file_type",
    "general.alignment",
)
"""Keys the writer makes itself, or that no longer hold."""
_FILE_TYPES = {"bf16": 32, "f32": 0}
"""llama.cpp's numbers for general.file_type."""


def export_gguf(model: str, file: Path, *, type: str) -> int:
    """Write the file and return how many tensors it has. Raises UserError for anything but a GGUF file, or when the output
    cannot be written."""
    if type not in _FILE_TYPES:
        raise UserError(f"--type must be bf16 or f32, got {type!r}.")
    path = resolve_model(model)
    if path.suffix != ".gguf":
        raise UserError(f"{path} is no GGUF file; llama.cpp's own converter makes one of a Hugging Face folder.")
    if file.resolve() == path.resolve():
        raise UserError("The output must be another file than the model itself.")
    try:
        partial = file.with_name(f".{file.name}.partial")
        try:
            num_tensors = _write(path, partial, type)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return num_tensors
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from error


def _write(path: Path, file: Path, type: str) -> int:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

    reader = GGUFReader(path)
    writer = GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(_FILE_TYPES[type])
    if "general.alignment" in reader.fields:
        writer.add_custom_alignment(int(reader.fields["general.alignment"].contents()))
    for name, field in reader.fields.items():
        if name not in _COMPUTED:
            kind, *sub_kind = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=sub_kind[0] if sub_kind else None)
    for tensor in reader.tensors:
        values: Any = dequantize(tensor.data, tensor.tensor_type)
        if type == "bf16" and values.ndim > 1:  # norms stay float32, as everywhere
            data = quantize(values, GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(reader.tensors)
