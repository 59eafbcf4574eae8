"""A draft as other engines want it: a whole model with the target's full vocabulary, as a Hugging Face folder or a GGUF file.

A draft's head knows some of the target's tokens. The others get one row in common, along minus the mean final hidden state,
so long that together they have next to no probability on the traces at hand; how much is measured, printed and written into
the card.

Legend: V target vocabulary, W draft vocabulary, D width, N positions.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from livedraft.device import choose_execution_path, versions
from livedraft.drafts.registry import MANIFEST_NAME, WEIGHTS_NAME, Registry, new_version_id
from livedraft.drafts.weights import (
    DraftWeights,
    check_against_target,
    draft_from_hf,
    draft_from_model,
    draft_from_target,
    load_draft,
    save_draft,
)
from livedraft.learning.batches import collate, example_from_trace
from livedraft.learning.forward import TargetParts, forward_of
from livedraft.learning.store import TraceStore, read_recorded
from livedraft.models.config import ModelConfig, hf_config
from livedraft.models.export_gguf import write_gguf_like
from livedraft.models.hf_runtime import module_of_config
from livedraft.models.load import EMBEDDING, FINAL_NORM, HEAD, load_model
from livedraft.models.open import open_model, vocabulary_size_of
from livedraft.models.pull import resolve_model
from livedraft.records import (
    DEFAULT_ROUTE,
    EXPORTED_TARGET_KEY,
    EXPORTED_TOKENS_KEY,
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

    num_layers: int
    vocabulary_size: int
    config: ModelConfig | None = None
    """None for a model of a family that transformers alone reads; `tensors` are then that family's."""
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
        data = f"sha256 of what it learnt from, as token ids: {version.data_sha256 or 'not kept'}"
    else:
        if registry is None:
            raise UserError(f"{version_id} is no folder of a draft.")
        decision = registry.version(version_id)["decision"] or {}
        version = DraftVersion(**registry.manifest(version_id))
        draft, traces = registry.load(version), _recent_traces(registry.state)
        measured = f"by the gate on requests it had not seen: alpha {decision.get('alpha')}"
        data = _data_of(registry.state, version)
    if format == "gguf" and draft.is_whole_model:  # the target's metadata would not be its own
        raise UserError(
            f"{version_id} is a whole model of its own; export it with --format hf, and llama.cpp's own converter makes a GGUF "
            "file of that folder."
        )
    parts = TargetParts.load(target, draft)
    exported = _whole(draft, parts, traces)
    card = _card(version, measured, data, draft, exported, target)
    try:
        if format == "hf":
            with _whole_folder(folder) as new:
                _write_folder(exported, draft, version, load_tokenizer(target, ()), new)
                (new / "README.md").write_text(card, encoding="utf-8")
        else:
            _write_gguf(exported, target, folder)
            folder.with_name(f"{folder.name}.md").write_text(card, encoding="utf-8")
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


def _data_of(state: Path, version: DraftVersion) -> str:
    """Of a version trained while serving. Requests may have been deleted since, so it is said of those still kept; by their
    ids, which no two share, because reading all texts would hold up whoever exports for a running server."""
    rows = [row for row in TraceStore(state).rows(limit=-1) if row.id <= version.last_trace_id and not row.is_held_out]
    digest = hashlib.sha256("\n".join(row.request_id for row in rows).encode()).hexdigest()
    return f"{len(rows)} of the requests it may have learnt from are kept; sha256 of their ids, one a line: {digest}"


def _whole(draft: DraftWeights, parts: TargetParts, traces: Sequence[Trace]) -> Exported:
    if draft.hf_config is not None:
        return _whole_of_transformers(draft, parts, traces)
    config = draft.config or parts.config
    assert config is not None
    embedding_VD = draft.tensors.get("embedding", parts.embedding_VD)
    assert embedding_VD is not None
    hidden_ND = _hidden_states(draft, parts, traces)
    # A whole model's own vocabulary may be padded differently from the target's.
    head_VD, absent_mass = _full_head(draft, config.vocabulary_size, hidden_ND)
    tensors = {EMBEDDING: embedding_VD, FINAL_NORM: draft.tensors["final_norm"], HEAD: head_VD}
    for index in range(draft.num_layers):
        tensors |= _layer(draft, config, index)
    whole = replace(config, num_layers=draft.num_layers, has_tied_embeddings=False)
    return Exported(
        num_layers=whole.num_layers,
        vocabulary_size=whole.vocabulary_size,
        config=whole,
        tensors={name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        absent_mass=absent_mass,
    )


def _whole_of_transformers(draft: DraftWeights, parts: TargetParts, traces: Sequence[Trace]) -> Exported:
    """As it is. It knows all of the target's tokens; rows of its head that are none are padding, which it was trained with."""
    num_rows = draft.num_input_tokens
    assert num_rows is not None
    mass = None
    if traces and num_rows > draft.vocabulary_size:
        padded = replace(draft, draft_to_target_W=torch.arange(num_rows))
        hidden_ND = _hidden_states(draft, parts, traces)
        with torch.inference_mode():
            probs_NV = forward_of(padded, parts, 0).head(hidden_ND).softmax(-1)
        mass = float(probs_NV[:, draft.vocabulary_size :].sum(-1).mean())
    return Exported(
        num_layers=draft.num_layers,
        vocabulary_size=num_rows,
        tensors={name: tensor.to(torch.bfloat16) for name, tensor in draft.tensors.items()},
        absent_mass=mass,
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


def _write_folder(
    exported: Exported, draft: DraftWeights, version: DraftVersion, tokenizer: Tokenizer, folder: Path
) -> None:
    """With its manifest, by which `import_draft` knows it again."""
    if exported.config is None:
        assert draft.hf_config is not None
        module = module_of_config(draft.hf_config, exported.tensors).to(torch.bfloat16)
        module.save_pretrained(folder)
        tokenizer.hf_tokenizer.save_pretrained(folder)
    else:
        names = {EXPORTED_TARGET_KEY: version.target_fingerprint, EXPORTED_VERSION_KEY: version.id}
        if not draft.is_whole_model:
            names[EXPORTED_TOKENS_KEY] = json.dumps(draft.draft_to_target_W.tolist())
        write_hf(exported.config, exported.tensors, tokenizer, folder, names)
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(version), indent=2), encoding="utf-8")


def _card(
    version: DraftVersion, measured: str, data: str, draft: DraftWeights, exported: Exported, target: Path
) -> str:
    if exported.absent_mass is not None:
        mass = f"{exported.absent_mass:.3%}"
    else:
        mass = "none" if draft.vocabulary_size == exported.vocabulary_size else "unknown: no traces at hand"
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft]
---
# Draft {version.id} for {target.stem}

A draft model for speculative decoding, exported by livedraft on {time.strftime("%Y-%m-%d")}; on its own it is of little use.

- target fingerprint {version.target_fingerprint}, tokenizer fingerprint {version.tokenizer_fingerprint}
- {version.num_layers} layers, {version.vocabulary_size} tokens known; probability of all others together: {mass}
- trained on {version.num_requests_seen} requests, parent {version.parent}
- {data}
- measured {measured}
- written with `{" ".join(sys.argv)}`
- versions: {", ".join(f"{name} {number}" for name, number in versions().items())}
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
    assert config is not None
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
    """A version's folder from elsewhere, or one that `export_draft` wrote as `hf`, becomes a version here, not in service.
    Raises UserError for what does not fit."""
    is_exported = not (folder / WEIGHTS_NAME).exists() and (folder / "config.json").exists()
    draft = _read_back(folder, target) if is_exported else load_draft(folder / WEIGHTS_NAME)
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
        data_sha256=None,
    )  # fmt: skip
    manifest = folder / MANIFEST_NAME
    if manifest.exists():
        theirs = json.loads(manifest.read_text(encoding="utf-8"))
        for name in ("target_fingerprint", "tokenizer_fingerprint"):
            if theirs.get(name) != getattr(version, name):
                raise UserError(f"{folder} was trained for another target or tokenizer ({name} {theirs.get(name)}).")
        version = replace(
            version, num_requests_seen=int(theirs.get("num_requests_seen", 0)), data_sha256=theirs.get("data_sha256")
        )
    elif is_exported and load_tokenizer(folder, ()).fingerprint != version.tokenizer_fingerprint:
        raise UserError(f"The tokenizer of {folder} is not the target's; a draft must share the target's vocabulary.")
    return registry.publish(lambda path: save_draft(draft, path), version, status="imported")


def _read_back(folder: Path, target: Path) -> DraftWeights:
    """What `export_draft` made a model of, to bf16's precision; another small model's folder is taken as it is."""
    tokens = _exported_tokens(folder)
    opened = open_model(folder, choose_execution_path("float32", "cpu"))
    if tokens is not None:
        assert opened.native is not None  # only what the native decoder reads is written with its tokens
        return draft_from_target(opened.native, num_layers=opened.native.config.num_layers, token_ids=tokens)
    if opened.native is not None:
        return draft_from_model(opened.native, vocabulary_size_of(target))
    return draft_from_hf(opened.hf_model, vocabulary_size_of(target))


def _exported_tokens(folder: Path) -> list[int] | None:
    """Those the draft knew, where it was layers of the target."""
    path = folder / "model.safetensors"
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            kept = (file.metadata() or {}).get(EXPORTED_TOKENS_KEY)
        return None if kept is None else [int(token) for token in json.loads(kept)]
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or no safetensors file ({error}).") from error
