"""Open a GGUF file once: parsing its vocabulary takes seconds, and both the weights and the tokenizer come from it."""

from __future__ import annotations

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
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever a broken byte leads to
        raise UserError(f"{path} is damaged or no GGUF file; fetch it again (`livedraft pull` checks it).") from error
    return metadata, list(reader.tensors)
