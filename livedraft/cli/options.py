"""Options that several verbs share, and the settings made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from livedraft.settings import Settings

Model = Annotated[str, typer.Option(help="A pulled name, a Hugging Face folder, or a .gguf file.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output; logs go to standard error.")
]
State = Annotated[Path | None, typer.Option(help="Folder of drafts and traces.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the serving process; default all cores.")]
Draft = Annotated[str, typer.Option(help="auto, none, untrained, a version id, or a draft's or small model's folder.")]
DEFAULT_MODEL = "smollm2-135m"
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings; `livedraft config show` prints all of them.")
]
NumSpeculative = Annotated[int | None, typer.Option(help="Fixed draft length; left out, costs decide.")]


def settings_of(file: Path | None, **flags: dict[str, Any]) -> Settings:
    from livedraft.settings import load_settings

    return load_settings(file, flags)
