"""What a long run writes at its end is looked at before it starts: minutes of work must not end in a typing error."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from livedraft.records import UserError


def check_outputs(*, files: tuple[Path | None, ...] = (), plot: Path | None = None) -> None:
    """Raises UserError when a file could not be written, or a plot not be drawn."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; install it with: pip install 'livedraft[bench]'.")
    for path in (*files, plot):
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise UserError(f"{path} could not be written in the end; name a file in a folder that is there.")
