"""A draft as other engines want it: a whole model with the target's full vocabulary, as a Hugging Face folder or a GGUF file.

A draft's head knows some of the target's tokens. The others get one row in common, along minus the mean final hidden state,
so long that together they have next to no probability on the traces at hand; how much is measured, printed and written into
the card.

Legend: V target vocabulary, W draft vocabulary, D width, N positions.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from livedraft.drafts.registry import MANIFEST_NAME, WEIGHTS_NAME, Registry, new_version_id
from livedraft.drafts.weights import DraftWeights, check_against_target, load_draft, save_draft
from livedraft.learning.batches import collate, example_from_trace
from livedraft.learning.forward import TargetParts, forward_of
from livedraft.learning.store import TraceStore, read_recorded
from livedraft.models.config import ModelConfig, hf_config
from livedraft.models.export_gguf import write_gguf_like
from livedraft.models.load import EMBEDDING, FINAL_NORM, HEAD, load_model
from livedraft.models.pull import resolve_model
from livedraft.records import (
    DEFAULT_ROUTE,
    EXPORTED_TARGET_KEY,
    EXPORTED_VERSION_KEY,
    DraftVersion,
    Trace,
    UserError,
)
from livedraft.tokenizer import Tokenizer, load_tokenizer

MAX_ABSENT_MASS = 0.005
_NUM_TRACES = 64
_NUM_LENGTHS = 20
"""Of the absent tokens' row, each half as long again as the one before; the shortest that is good enough, else the best."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The draft as a model of its own."""

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    """Hugging Face names, bf16."""
    absent_mass: float | None
    """Mean probability of all tokens the draft does not know, on the traces; None where it knows all or there are no traces."""


def export_draft(registry: Registry | None, version_id: str, target: Path, folder: Path, *, format: str) -> Exported:
    """Write a version, or a draft's folder that `distill` left, as `hf` (a folder) or `gguf` (a file). Raises UserError for
    what cannot be exported or written."""
    if format not in ("hf", "gguf"):
        raise UserError(f"--format must be hf or gguf, got {format!r}.")
    source = Path(version_id)
    if (source / WEIGHTS_NAME).exists():
        version, draft, traces = _distilled(source)
        measured = f"by `distill` on prompts kept back: alpha {version.alpha}"
    else:
        if registry is None:
            raise UserError(f"{version_id} is no folder of a draft.")
        decision = registry.version(version_id)["decision"] or {}
        version = DraftVersion(**registry.manifest(version_id))
        draft, traces = registry.load(version), _recent_traces(registry.state)
        measured = f"by the gate on requests it had not seen: alpha {decision.get('alpha')}"
    if draft.hf_config is not None:
        raise UserError(
            f"{version_id} is a whole model of transformers already; its base folder and draft.safetensors are it."
        )
    parts = TargetParts.load(target, draft)
    exported = _whole(draft, parts, traces)
    tokenizer = load_tokenizer(target, ())
    card = _card(version, measured, exported, target)
    try:
        if format == "hf":
            names = {EXPORTED_TARGET_KEY: version.target_fingerprint, EXPORTED_VERSION_KEY: version.id}
            with _whole_folder(folder) as new:
                write_hf(exported.config, exported.tensors, tokenizer, new, names)
                (new / "README.md").write_text(card, encoding="utf-8")
        else:
            _write_gguf(exported, target, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}).") from error
    return exported


def export_target(model: str, folder: Path) -> ModelConfig:
    """Write a target that the native decoder reads as a Hugging Face folder in bf16, for engines that read nothing else.

    Raises UserError for a model that is such a folder already, or when the folder cannot be written.
    """
    path = resolve_model(model)
    if path.is_dir():
        raise UserError(f"{path} is a Hugging Face folder already.")
    loaded = load_model(path, torch.bfloat16)
    card = f"# {path.stem} in bf16\n\nWritten by livedraft {metadata.version('livedraft')} from `{path.name}`.\n"
    try:
        with _whole_folder(folder) as new:
            write_hf(loaded.config, loaded.tensors, load_tokenizer(path, loaded.config.eos_token_ids), new)
            (new / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}).") from error
    return loaded.config


def _distilled(folder: Path) -> tuple[DraftVersion, DraftWeights, list[Trace]]:
    """With some of what it learnt from, where that is beside it."""
    try:
        version = DraftVersion(**json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder} has no {MANIFEST_NAME} that can be read ({error}).") from error
    parts = sorted((folder.parent / "responses").glob("part-*.st"))
    traces = read_recorded(parts[0])[:_NUM_TRACES] if parts else []
    return version, load_draft(folder / WEIGHTS_NAME), traces


def _recent_traces(state: Path) -> list[Trace]:
    store = TraceStore(state)
    return [trace for row in store.rows(limit=-1)[-_NUM_TRACES:] if (trace := store.read(row)) is not None]


def _whole(draft: DraftWeights, parts: TargetParts, traces: Sequence[Trace]) -> Exported:
    config = draft.config or parts.config
    assert config is not None
    embedding_VD = draft.tensors.get("embedding", parts.embedding_VD)
    assert embedding_VD is not None
    hidden_ND = _hidden_states(draft, parts, traces)
    head_VD, absent_mass = _full_head(draft, parts.vocabulary_size, hidden_ND)
    tensors = {EMBEDDING: embedding_VD, FINAL_NORM: draft.tensors["final_norm"], HEAD: head_VD}
    for index in range(draft.num_layers):
        tensors |= _layer(draft, config, index)
    whole = replace(config, num_layers=draft.num_layers, has_tied_embeddings=False)
    return Exported(
        config=whole,
        tensors={name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        absent_mass=absent_mass,
    )


def _layer(draft: DraftWeights, config: ModelConfig, index: int) -> dict[str, torch.Tensor]:
    """Fused matrices apart again, under Hugging Face's names."""
    prefix, to = f"layers.{index}.", f"model.layers.{index}."
    H, G, E = config.num_heads, config.num_kv_heads, config.head_width
    get = draft.tensors.get
    tensors = {
        to + "input_layernorm.weight": get(prefix + "attention_norm"),
        to + "post_attention_layernorm.weight": get(prefix + "feed_forward_norm"),
        to + "self_attn.o_proj.weight": get(prefix + "attention_output.weight"),
        to + "mlp.down_proj.weight": get(prefix + "down.weight"),
        to + "self_attn.q_norm.weight": get(prefix + "query_norm"),
        to + "self_attn.k_norm.weight": get(prefix + "key_norm"),
    }
    for part in ("weight", "bias"):
        fused = get(f"{prefix}query_key_value.{part}")
        if fused is not None:
            for name, piece in zip("qkv", fused.split([H * E, G * E, G * E]), strict=True):
                tensors[f"{to}self_attn.{name}_proj.{part}"] = piece
    gate, up = draft.tensors[prefix + "gate_up.weight"].chunk(2)
    tensors |= {to + "mlp.gate_proj.weight": gate, to + "mlp.up_proj.weight": up}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@torch.inference_mode()
def _hidden_states(draft: DraftWeights, parts: TargetParts, traces: Sequence[Trace]) -> torch.Tensor | None:
    """Final hidden states at the traces' output positions; None without traces."""
    if not traces:
        return None
    lookup_V = torch.full((parts.vocabulary_size,), -1)
    lookup_V[draft.draft_to_target_W] = torch.arange(draft.vocabulary_size)
    longest = max(len(trace.prompt_token_ids) + len(trace.output_token_ids) for trace in traces)
    forward = forward_of(draft, parts, longest)
    states = []
    for number, trace in enumerate(traces):
        batch = collate([example_from_trace(trace, number)], lookup_V, every_position=True)
        states.append(forward.hidden(batch.token_ids_BT)[batch.loss_rows_N])
    return torch.cat(states)


def _full_head(
    draft: DraftWeights, vocabulary_size: int, hidden_ND: torch.Tensor | None
) -> tuple[torch.Tensor, float | None]:
    """([V, D], mean probability of the tokens the draft lacks). Their row is made longer until that is next to nothing."""
    head_WD = draft.tensors["head"]
    num_absent = vocabulary_size - draft.vocabulary_size
    mean_D = head_WD.mean(0) if hidden_ND is None else hidden_ND.mean(0)
    direction_D = -mean_D / mean_D.norm()
    length, mass = float(head_WD.norm(dim=1).mean()), None
    if hidden_ND is not None and num_absent:
        known_N = torch.logsumexp(hidden_ND @ head_WD.T, dim=-1)
        tried = []
        for step in range(_NUM_LENGTHS):
            longer = length * 1.5**step
            absent_N = hidden_ND @ (longer * direction_D) + np.log(num_absent)
            tried.append((float(torch.sigmoid(absent_N - known_N).mean()), longer))
            if tried[-1][0] < MAX_ABSENT_MASS:
                break
        mass, length = min(tried)
    head_VD = (length * direction_D).expand(vocabulary_size, -1).clone()
    head_VD[draft.draft_to_target_W] = head_WD
    return head_VD, mass


# --- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder that takes its name, or its files their place in an older one, only when nothing was raised: Ctrl-C and a
    full disk leave no half model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        new = Path(made) / folder.name
        new.mkdir()
        yield new
        if not folder.exists():
            new.rename(folder)
            return
        for file in [path for path in new.rglob("*") if path.is_file()]:
            place = folder / file.relative_to(new)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)


def _card(version: DraftVersion, measured: str, exported: Exported, target: Path) -> str:
    mass = "unknown: no traces at hand" if exported.absent_mass is None else f"{exported.absent_mass:.3%}"
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft]
---
# Draft {version.id} for {target.stem}

A draft model for speculative decoding, exported by livedraft on {time.strftime("%Y-%m-%d")}; on its own it is of little use.

- target fingerprint {version.target_fingerprint}, tokenizer fingerprint {version.tokenizer_fingerprint}
- {version.num_layers} layers, {version.vocabulary_size} tokens known; probability of all others together: {mass}
- trained on {version.num_requests_seen} requests, parent {version.parent}
- measured {measured}
- written by livedraft {metadata.version("livedraft")} with `{" ".join(sys.argv)}`
- sha256 of draft.safetensors: {version.sha256}
"""


def write_hf(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    folder: Path,
    names: Mapping[str, str] | None = None,
) -> None:
    """A model in bf16 as a Hugging Face folder. `names` go into the weights' metadata, for whoever has to know them from the
    file alone."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **(names or {})})
    (folder / "config.json").write_text(
        json.dumps(hf_config(config) | {"dtype": "bfloat16"}, indent=2), encoding="utf-8"
    )
    tokenizer.hf_tokenizer.save_pretrained(folder)


_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _write_gguf(exported: Exported, target: Path, file: Path) -> None:
    """With the metadata of the target's own GGUF file: its tokenizer, and all but the number of layers."""
    if target.suffix != ".gguf":
        raise UserError(
            "A GGUF draft takes its tokenizer from the target's GGUF file, and this target is none; use --format hf."
        )
    config = exported.config
    tensors = (
        (_gguf_name(name), _interleaved(name, tensor.float(), config).numpy())
        for name, tensor in exported.tensors.items()
    )
    write_gguf_like(target, file, tensors, num_layers=config.num_layers)


def _gguf_name(name: str) -> str:
    whole = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
    if name in whole:
        return whole[name]
    _, _, index, rest = name.split(".", 3)
    stem, part = rest.rsplit(".", 1)
    return f"blk.{index}.{_GGUF_LAYER_NAMES[stem]}.{part}"


def _interleaved(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """llama.cpp interleaves the two rotary halves of the Llama family's queries and keys."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or config.family != "llama" or tensor.ndim != 2:
        return tensor
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


# --- taking in ------------------------------------------------------------------------------------------------------


def import_draft(registry: Registry, folder: Path, target: Path) -> DraftVersion:
    """A version's folder from elsewhere becomes a version here, not in service. Raises UserError for what does not fit."""
    draft = load_draft(folder / WEIGHTS_NAME)
    serving = registry.in_service(DEFAULT_ROUTE)
    if serving is None:
        raise UserError(f"{registry.state} has no draft in service yet; start serving with it first.")
    if not draft.is_whole_model:
        config = TargetParts.load(target, draft).config
        assert config is not None
        check_against_target(draft, config, str(folder), config.vocabulary_size)
    version = replace(
        serving, id=new_version_id(len(registry.versions())), parent=serving.id, sha256="", num_layers=draft.num_layers,
        vocabulary_size=draft.vocabulary_size, created_at=time.time(), num_requests_seen=0, last_trace_id=0, alpha=None,
    )  # fmt: skip
    manifest = folder / MANIFEST_NAME
    if manifest.exists():
        theirs = json.loads(manifest.read_text(encoding="utf-8"))
        for name in ("target_fingerprint", "tokenizer_fingerprint"):
            if theirs.get(name) != getattr(version, name):
                raise UserError(f"{folder} was trained for another target or tokenizer ({name} {theirs.get(name)}).")
        version = replace(version, num_requests_seen=int(theirs.get("num_requests_seen", 0)))
    return registry.publish(lambda path: save_draft(draft, path), version, status="imported")
