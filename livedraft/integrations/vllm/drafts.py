"""The learner's drafts as vLLM takes them: the first version of a fresh state, and any version as a Hugging Face folder."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from livedraft.config import SpeculationConfig
from livedraft.draft_source import is_whole_model
from livedraft.drafts.registry import WEIGHTS_NAME, Registry, new_version_id
from livedraft.drafts.weights import (
    DraftWeights,
    check_against_target,
    draft_from_model,
    draft_from_target,
    file_sha256,
    load_draft,
    lowest_token_ids,
    save_draft,
)
from livedraft.export import export_draft, export_target
from livedraft.models.load import EMBEDDING, FINAL_NORM, HEAD, LoadedModel, load_model
from livedraft.records import DEFAULT_ROUTE, DraftVersion, UserError
from livedraft.tokenizer import Tokenizer, load_tokenizer

_WEIGHTS_FILE, _CHECKSUM_NAME = "model.safetensors", "sha256"
_NUM_KEPT_FOLDERS = 3
"""Exported versions; each is the size of a whole small model."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the learner knows of the model that vLLM serves."""

    folder: Path
    fingerprint: str
    tokenizer: Tokenizer
    first_layers: LoadedModel
    """As many layers as a fresh draft has, and embedding, norm and head."""


def target_folder(model: Path, state: Path) -> Path:
    """vLLM reads Hugging Face folders: a GGUF file's weights are written as one, once. Raises UserError."""
    if model.is_dir():
        return model
    folder = state / "vllm" / "target"
    if not (folder / "config.json").exists():
        partial = folder.with_name("target.partial")
        shutil.rmtree(partial, ignore_errors=True)
        export_target(str(model), partial)
        partial.rename(folder)
    return folder


def read_target(folder: Path, speculation: SpeculationConfig) -> Target:
    """Raises UserError for a model whose layers no draft can be made of."""
    layers = tuple(f"model.layers.{index}." for index in range(speculation.num_draft_layers))
    kept = load_model(
        folder, torch.float32, keep=lambda name: name in (EMBEDDING, FINAL_NORM, HEAD) or name.startswith(layers)
    )
    return Target(
        folder=folder,
        fingerprint=kept.fingerprint,
        tokenizer=load_tokenizer(folder, kept.config.eos_token_ids),
        first_layers=kept,
    )


def first_version(registry: Registry, target: Target, draft: str, speculation: SpeculationConfig) -> DraftVersion:
    """What is in service, or the first version of a fresh state: the target's own layers, a draft's folder, or a whole small
    model. Raises UserError for what does not fit."""
    serving = registry.in_service(DEFAULT_ROUTE)
    if serving is not None:
        if serving.target_fingerprint != target.fingerprint:
            raise UserError(
                f"The drafts in {registry.state} were trained for another target; give another --state or the target "
                "they know."
            )
        return serving
    weights = _first_weights(target, draft, speculation)
    version = DraftVersion(
        id=new_version_id(0), route=DEFAULT_ROUTE, parent=None, sha256="", target_fingerprint=target.fingerprint,
        tokenizer_fingerprint=target.tokenizer.fingerprint, num_layers=weights.num_layers,
        vocabulary_size=weights.vocabulary_size, created_at=time.time(),
    )  # fmt: skip
    return registry.publish(lambda path: save_draft(weights, path), version, status="in_service")


def _first_weights(target: Target, draft: str, speculation: SpeculationConfig) -> DraftWeights:
    config = target.first_layers.config
    path = Path(draft)
    if (path / WEIGHTS_NAME).exists():
        weights = load_draft(path / WEIGHTS_NAME)
        check_against_target(weights, config, str(path), config.vocabulary_size)
        return weights
    if is_whole_model(draft):
        model = load_model(path, torch.float32)
        if load_tokenizer(path, ()).fingerprint != target.tokenizer.fingerprint:
            raise UserError(f"The tokenizer of {path} is not the target's; a draft must share the target's vocabulary.")
        if model.config.vocabulary_size != config.vocabulary_size:
            raise UserError(f"vLLM needs a draft with the target's vocabulary size; {path} has another one.")
        return draft_from_model(model, config.vocabulary_size)
    if draft not in ("auto", "none", "ngram"):
        raise UserError(f"There is no draft {draft!r}: give auto, none, ngram, a draft's folder or a small model's.")
    tokens = lowest_token_ids(config.vocabulary_size, speculation.draft_vocabulary_size)
    return draft_from_target(target.first_layers, num_layers=speculation.num_draft_layers, token_ids=tokens)


@dataclass(frozen=True, kw_only=True)
class ExportedVersion:
    version: str
    folder: Path
    sha256: str

    @property
    def file(self) -> Path:
        return self.folder / _WEIGHTS_FILE


def exported(registry: Registry, version_id: str, target: Target) -> ExportedVersion:
    """The version as a whole model's folder, written once. Raises UserError."""
    folder = registry.state / "vllm" / "drafts" / version_id
    if not (folder / _CHECKSUM_NAME).exists():
        partial = folder.with_name(f".{version_id}")
        shutil.rmtree(partial, ignore_errors=True)
        export_draft(registry, version_id, target.folder, partial, format="hf")
        (partial / _CHECKSUM_NAME).write_text(file_sha256(partial / _WEIGHTS_FILE), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # without its last file: a crash in the middle of a removal
        partial.rename(folder)
    return ExportedVersion(
        version=version_id, folder=folder, sha256=(folder / _CHECKSUM_NAME).read_text(encoding="utf-8")
    )


def remove_old(registry: Registry, in_use: set[str]) -> None:
    """Exported folders that nobody serves, but the newest few."""
    folders = sorted((registry.state / "vllm" / "drafts").glob("v*"), key=lambda folder: folder.stat().st_mtime)
    for folder in [one for one in folders if one.name not in in_use][:-_NUM_KEPT_FOLDERS]:
        shutil.rmtree(folder, ignore_errors=True)
