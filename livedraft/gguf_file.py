"""Open a GGUF file once: both the weights and the tokenizer come from it."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from livedraft.records import UserError


def read_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """(metadata, tensor entries), or a UserError when the file cannot be read. The tensors stay on disk until used."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, _size: int, _modified: int) -> tuple[dict[str, Any], list[Any]]:
    try:
        reader = open_gguf(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever a broken byte leads to
        raise UserError(f"{path} is damaged or no GGUF file; fetch it again (`livedraft pull` checks it).") from error
    return metadata, list(reader.tensors)


def open_gguf(path: Path) -> Any:
    """The library's reader, but for arrays: it makes numpy views of every word of a vocabulary, which takes seconds."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc]  # the library has no types here
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
            start, types = orig_offs + 12, [GGUFValueType.ARRAY, GGUFValueType(item_type)]
            if item_type == GGUFValueType.STRING:
                bytes_, parts, end = memoryview(self.data), [], start
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", bytes_, end)
                    parts.append(bytes_[end + 8 : end + 8 + length])
                    end += 8 + length
                if end > len(bytes_):
                    raise ValueError("an array goes past the end of the file")
                return end - orig_offs, parts, list(range(count)), types
            scalar = self.gguf_scalar_to_np.get(item_type)
            if scalar is None:
                return super()._get_field_parts(orig_offs, raw_type)
            values = self._get(start, scalar, count)
            return 12 + int(values.nbytes), [values], [0], types

    return Reader(path)
