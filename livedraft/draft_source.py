"""Where drafts come from: the target's own first layers, a version on disk, or a whole small model; and how one becomes
resident."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from livedraft.config import SpeculationConfig
from livedraft.device import ExecutionPath
from livedraft.drafts.registry import MANIFEST_NAME, WEIGHTS_NAME, Registry, new_version_id
from livedraft.drafts.weights import (
    DamagedDraftError,
    DraftWeights,
    check_against_target,
    draft_from_hf,
    draft_from_model,
    draft_from_target,
    load_draft,
    lowest_token_ids,
    save_draft,
    serving_weights,
)
from livedraft.events import Events
from livedraft.models.decoder import Decoder
from livedraft.models.graphs import on_own_stream
from livedraft.models.hf_runtime import HFRuntime, max_positions_of, module_of_config
from livedraft.models.native import fitted, make_decoder
from livedraft.models.open import OpenModel, open_model
from livedraft.models.static_decoder import StaticDecoder
from livedraft.models.step import ModelStep
from livedraft.records import DEFAULT_ROUTE, DraftVersion, UserError
from livedraft.speculation.draft_loop import DraftSlots
from livedraft.speculation.draft_model import DraftModel
from livedraft.tokenizer import Tokenizer, load_tokenizer

UNTRAINED = "untrained"
"""The version name of a draft made of the target's first layers."""
_SPARE_SLOTS = 2
_BARE_PRIOR = 0.05
"""Its acceptance on GSM8K and on the demo's stream is .06 to .07: too little to draft for, so only probes do."""


def is_whole_model(draft: str) -> bool:
    """A folder or file of a model of its own, not of a draft made of the target's layers."""
    return (Path(draft) / "config.json").exists() or draft.endswith(".gguf")


def tokenizer_of(model_path: Path, opened: OpenModel) -> Tokenizer:
    """Raises UserError when tokenizer and model do not belong together."""
    tokenizer = load_tokenizer(model_path, opened.eos_token_ids)
    if tokenizer.num_tokens > opened.vocabulary_size:
        raise UserError(
            f"The tokenizer in {model_path} has {tokenizer.num_tokens} tokens and the model {opened.vocabulary_size}; "
            "they do not belong together."
        )
    return tokenizer


def untrained_draft(opened: OpenModel, speculation: SpeculationConfig) -> DraftWeights | None:
    """Of the target's first layers, while its plain tensors are still at hand; None where the native decoder does not read
    it."""
    if opened.native is None:
        return None
    return draft_from_target(
        opened.native,
        num_layers=speculation.num_draft_layers,
        token_ids=lowest_token_ids(opened.vocabulary_size, speculation.draft_vocabulary_size),
    )


class DraftSource:
    """For one target. Called at start, and by the swap watcher's thread for versions that come later."""

    def __init__(
        self,
        target: ModelStep,
        *,
        path: ExecutionPath,
        tokenizer: Tokenizer,
        target_fingerprint: str,
        registry: Registry | None,
        events: Events,
        learns: bool,
        untrained: DraftWeights | None,
    ) -> None:
        self.target, self.path, self.tokenizer, self.target_fingerprint = target, path, tokenizer, target_fingerprint
        self.registry, self.events, self.learns, self._untrained = registry, events, learns, untrained
        self._slots = DraftSlots(target) if isinstance(target, StaticDecoder) else None

    def reserve_slots(self) -> None:
        """Where a swap needs a slot that is ready: room for a canary and for the version after it."""
        if self._slots is not None:
            self._slots.reserve(_SPARE_SLOTS)

    def resident(self, version_id: str) -> DraftModel:
        """A version, "untrained", or a whole small model, loaded and laid out for serving, with its own empty cache."""
        name = Path(version_id).resolve().name if is_whole_model(version_id) else version_id
        return self.laid_out(self.weights(version_id), name)

    def weights(self, version_id: str) -> DraftWeights:
        """As they are trained: float32. Raises UserError for what is not there or does not fit."""
        if is_whole_model(version_id):
            return self._whole_model(Path(version_id))
        if version_id != UNTRAINED:
            return self._stored_draft(version_id)
        if self._untrained is None:
            raise UserError("This LLM was made without a draft; leave out draft='none'.")
        return self._untrained

    def laid_out(self, weights: DraftWeights, version: str) -> DraftModel:
        target = self.target
        native = target if isinstance(target, Decoder) else None
        config = weights.config or (native.config if native else None)
        if config is None and weights.hf_config is None:
            raise UserError(
                "Drafts of the target's own layers need a target the native decoder reads; give draft='none' or the "
                "folder of a small model with the same tokenizer."
            )
        check_against_target(weights, config, f"Draft {version}", target.vocabulary_size)
        runtime: ModelStep
        path = fitted(self.path, None if weights.hf_config is not None else config)
        # Where the draft's own context is shorter, longer requests decode plainly past it.
        if weights.hf_config is not None:
            module = module_of_config(weights.hf_config, weights.tensors).to(path.device, path.dtype)
            max_length = min(target.max_length, max_positions_of(module))
            runtime = HFRuntime(module, num_slots=target.num_slots, max_length=max_length, device=path.device)
        else:
            assert config is not None
            if self._slots is not None:
                with on_own_stream(path.device):
                    laid_out = serving_weights(weights, native.weights if native else None, path, config)
                    return self._slots.lend(
                        config, laid_out, weights.draft_to_target_W, version=version, keep_logits=self.learns
                    )
            laid_out = serving_weights(weights, native.weights if native else None, path, config)
            max_length = min(target.max_length, config.max_positions)
            runtime = make_decoder(config, laid_out, path, num_slots=target.num_slots, max_length=max_length)
        return DraftModel(
            runtime,
            weights.draft_to_target_W,
            version=version,
            keep_logits=self.learns,
            target_vocabulary_size=target.vocabulary_size,
        )

    def _whole_model(self, path: Path) -> DraftWeights:
        """A small model of its own as the draft; its tokenizer must be the target's. Families may pad their vocabularies
        differently: only tokens both have are proposed."""
        opened = open_model(path, self.path)
        if tokenizer_of(path, opened).fingerprint != self.tokenizer.fingerprint:
            raise UserError(f"The tokenizer of {path} is not the target's; a draft must share the target's vocabulary.")
        if opened.native is not None:
            return draft_from_model(opened.native, self.target.vocabulary_size)
        return draft_from_hf(opened.hf_model, self.target.vocabulary_size)

    def _stored_draft(self, version_id: str) -> DraftWeights:
        folder = Path(version_id)
        if (folder / WEIGHTS_NAME).exists():
            self._check_manifest(folder)
            return load_draft(folder / WEIGHTS_NAME)
        manifest = self.registry.manifest(version_id) if self.registry else {}
        if self.registry is None or not manifest:
            raise UserError(
                f"There is no draft {version_id!r}: neither a version in the state folder nor a draft's folder."
            )
        version = DraftVersion(**manifest)
        if version.target_fingerprint != self.target_fingerprint:
            raise UserError(f"Version {version.id} was trained for another target ({version.target_fingerprint}).")
        if version.tokenizer_fingerprint != self.tokenizer.fingerprint:
            raise UserError(f"Version {version.id} was trained with another tokenizer.")
        return self.registry.load(version)

    def _check_manifest(self, folder: Path) -> None:
        """A draft's folder from elsewhere may say what it was trained for."""
        manifest = _manifest(folder)
        for name, ours in (("target", self.target_fingerprint), ("tokenizer", self.tokenizer.fingerprint)):
            theirs = manifest.get(f"{name}_fingerprint", ours)
            # Rounding the target's weights changes it too little for a draft to mind.
            if theirs.removesuffix("-int8") != ours.removesuffix("-int8"):
                raise UserError(f"The draft in {folder} was trained for another {name} ({theirs}).")

    def first(self, draft: str) -> DraftModel | None:
        """What serving starts with: as asked, or what is in service, or an untrained one. None: this target decodes plainly.

        A fresh state of a learning server gets its first version here. Raises UserError for what does not fit.
        """
        if draft != "auto" and not self.learns:
            return self.resident(draft)
        if draft != "auto" and not is_whole_model(draft):
            return self._first_by_name(draft)
        version = self.registry.in_service(DEFAULT_ROUTE) if self.registry else None
        if self.registry and version is not None and version.target_fingerprint != self.target_fingerprint:
            raise UserError(
                f"The drafts in {self.registry.state} were trained for another target; give another --state or the "
                "target they know."
            )
        resident = self._last_good_draft(version)
        if resident is not None:
            if draft != "auto":
                self._check_kind(Path(draft))
            return resident
        if draft != "auto":
            return self.resident(self._publish(self._whole_model(Path(draft))).id)
        if self._untrained is None:
            if self.learns:
                raise UserError(
                    "learn needs a target the native decoder reads (Llama, Qwen2 or Qwen3), or a whole small model as --draft."
                )
            return None  # a target of another family decodes plainly
        return self.resident(self._publish(self._untrained).id if self.learns else UNTRAINED)

    def _first_by_name(self, draft: str) -> DraftModel:
        """With learning the state's own version in service is what serves and what training goes on from."""
        assert self.registry is not None
        serving = self.registry.in_service(DEFAULT_ROUTE)
        if draft == UNTRAINED and serving is None:
            weights, _ = self.untrained()
            return self.resident(self._publish(weights).id)
        if self.registry.manifest(draft):
            resident = self.resident(draft)
            self.registry.serve(draft, DEFAULT_ROUTE, {"promoted_by": "the command line"})
            return resident
        if serving is None and (Path(draft) / WEIGHTS_NAME).exists():
            return self.resident(self._publish(self._stored_draft(draft)).id)
        raise UserError(
            f"Learning goes on from the drafts in {self.registry.state}; take {draft} in with `livedraft drafts import`, or "
            "serve it with --no-learn."
        )

    def _check_kind(self, path: Path) -> None:
        """The state's drafts must have come from this whole model: another one's training cannot go on there."""
        assert self.registry is not None
        serving = self.registry.in_service(DEFAULT_ROUTE)
        assert serving is not None
        kept, given = self.registry.load(serving), self._whole_model(path)
        if {name: t.shape for name, t in kept.tensors.items()} != {name: t.shape for name, t in given.tensors.items()}:
            raise UserError(f"{self.registry.state} holds drafts of another kind than {path}; give another --state.")

    def _last_good_draft(self, version: DraftVersion | None) -> DraftModel | None:
        """The version in service or, where its folder is damaged, the nearest one before it that can be read."""
        while version is not None and self.registry is not None:
            try:
                return self.resident(version.id)
            except DamagedDraftError as error:  # any other error would hold for all versions alike
                self.events.emit("draft_refused", version=version.id, reason=str(error))
                try:
                    before = self.registry.roll_back(DEFAULT_ROUTE, {})
                except UserError:
                    before = None
                self.registry.set_aside(version.id, str(error))
                version = before
        return None

    def prior_of(self, draft: DraftModel | None) -> float:
        """The acceptance to expect: what the gate measured, what a draft's folder says was measured, next to nothing of the
        target's bare layers, else an even guess."""
        if draft is None:
            return 0.0
        rows = self.registry.versions(DEFAULT_ROUTE) if self.registry else []
        decision = next((row["decision"] for row in rows if row["id"] == draft.version), None)
        if decision and decision.get("alpha") is not None:
            return float(decision["alpha"])
        alpha = _manifest(Path(draft.version)).get("alpha")
        if alpha is not None:
            return float(alpha)
        serving = self.registry.in_service(DEFAULT_ROUTE) if self.registry else None
        is_first = serving is not None and serving.id == draft.version and serving.parent is None
        return _BARE_PRIOR if is_first or draft.version == UNTRAINED else 0.3

    def untrained(self) -> tuple[DraftWeights, DraftVersion]:
        """The draft every stream starts from, with its description as a first version. Raises UserError without one."""
        if self._untrained is None:
            raise UserError(
                "There is no untrained draft: the native decoder does not read this target, or draft is 'none'."
            )
        return self._untrained, self._first_version(self._untrained)

    def _first_version(self, weights: DraftWeights) -> DraftVersion:
        return DraftVersion(
            id=new_version_id(0),
            route=DEFAULT_ROUTE,
            parent=None,
            sha256="",
            target_fingerprint=self.target_fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            num_layers=weights.num_layers,
            vocabulary_size=weights.vocabulary_size,
            created_at=time.time(),
        )

    def _publish(self, weights: DraftWeights) -> DraftVersion:
        """The first version of a fresh state: the trainer starts from it and traces name it."""
        assert self.registry is not None
        version = self._first_version(weights)
        return self.registry.publish(lambda path: save_draft(weights, path), version, status="in_service")


def _manifest(folder: Path) -> dict[str, Any]:
    """What a draft's folder says of it; nothing where there is none."""
    try:
        found = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
