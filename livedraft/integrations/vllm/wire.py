"""What crosses between vLLM's workers and the parent, as both sides know it: tapped requests, and files of draft weights.

Runs inside vLLM too: standard library, torch and safetensors only.

Legend: T output positions, K teacher tokens, P drafted positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from livedraft.records import EXPORTED_TARGET_KEY, EXPORTED_VERSION_KEY

PROTOCOL = 1
"""Raised with every change of what crosses: both sides must say the same."""
REQUEST_ID_PREFIX, PRIVATE_ID_PREFIX = "livedraft-", "livedraftprivate-"
"""How the parent names requests to vLLM; those of the second kind are not tapped."""


@dataclass(kw_only=True)
class TappedRequest:
    """One finished request as a worker saw it. Tensors on the CPU; log-probabilities are raw."""

    id: str
    """vLLM's own, which holds the parent's."""
    sampling: dict[str, Any]
    draft_version: str
    """Resident when its first token came."""
    prompt_token_ids: torch.Tensor  # int32
    output_token_ids_T: torch.Tensor  # int32, as sampled: what the client's stop strings cut off is still there
    teacher_token_ids_TK: torch.Tensor  # int32
    teacher_log_probs_TK: torch.Tensor  # float16
    tail_mass_T: torch.Tensor  # float32
    round_number_T: torch.Tensor  # int32
    version_T: list[str]
    """Which draft proposed in that round; none where nothing was drafted."""
    drafted_position_P: torch.Tensor  # int32
    drafted_token_id_P: torch.Tensor  # int32
    drafted_log_prob_P: torch.Tensor  # float32, the draft's; 0 where it proposed without probabilities
    drafted_target_log_prob_P: torch.Tensor  # float32
    drafted_accepted_P: torch.Tensor  # bool
    drafted_off_path_P: torch.Tensor  # bool, after the first rejection of its round


_PER_OUTPUT = ("output_token_ids_T", "teacher_token_ids_TK", "teacher_log_probs_TK", "tail_mass_T", "round_number_T")
_PER_DRAFTED = (
    "drafted_position_P", "drafted_token_id_P", "drafted_log_prob_P", "drafted_target_log_prob_P", "drafted_accepted_P",
    "drafted_off_path_P",
)  # fmt: skip


def pack(requests: Sequence[TappedRequest]) -> bytes:
    """Several requests as one safetensors buffer."""
    names = ("prompt_token_ids", *_PER_OUTPUT, *_PER_DRAFTED)
    tensors = {name: torch.cat([getattr(request, name) for request in requests]).contiguous() for name in names}
    heads = [
        {
            "id": request.id,
            "sampling": request.sampling,
            "draft_version": request.draft_version,
            "versions": _runs(request.version_T),
            "lengths": [
                len(request.prompt_token_ids), len(request.output_token_ids_T), len(request.drafted_position_P)
            ],
        }
        for request in requests
    ]  # fmt: skip
    return save(tensors, metadata={"protocol": str(PROTOCOL), "requests": json.dumps(heads)})


def unpack(buffer: bytes) -> list[TappedRequest]:
    """Raises ValueError for what `pack` of this protocol did not make."""
    try:
        size = int.from_bytes(buffer[:8], "little")
        metadata = json.loads(buffer[8 : 8 + size])["__metadata__"]
        if metadata["protocol"] != str(PROTOCOL):
            raise ValueError(f"protocol {metadata['protocol']} is not {PROTOCOL}")
        tensors = load(buffer)
        starts, requests = [0, 0, 0], []
        for head in json.loads(metadata["requests"]):
            ends = [start + length for start, length in zip(starts, head["lengths"], strict=True)]
            prompt, output, drafted = (slice(a, b) for a, b in zip(starts, ends, strict=True))
            cuts = {name: tensors[name][output] for name in _PER_OUTPUT}
            cuts |= {name: tensors[name][drafted] for name in _PER_DRAFTED}
            versions = [version for version, count in head["versions"] for _ in range(count)]
            cuts["prompt_token_ids"] = tensors["prompt_token_ids"][prompt]
            scalars = {name: head[name] for name in ("id", "sampling", "draft_version")}
            requests.append(TappedRequest(**scalars, version_T=versions, **cuts))
            starts = ends
        if any(starts[index] != len(tensors[name]) for index, name in enumerate(("prompt_token_ids", *_FIRST))):
            raise ValueError("lengths and tensors differ")
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"no tapped requests ({error})") from error
    return requests


_FIRST = (_PER_OUTPUT[0], _PER_DRAFTED[0])


def _runs(values: Sequence[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


# --- draft weights --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WeightsManifest:
    """What a file of draft weights holds, read from its header alone."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name to (dtype, shape)."""
    target: str
    version: str


class BadWeightsError(ValueError):
    """A file that must not come near the engine; the sentence says why."""


def read_manifest(path: Path) -> WeightsManifest:
    """Of one safetensors file. Raises BadWeightsError for a file that is missing, damaged or none."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                tensors[name] = (str(part.get_dtype()), tuple(part.get_shape()))
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadWeightsError(f"{path.name} is missing, damaged or no safetensors file ({error}).") from error
    return WeightsManifest(
        tensors=tensors, target=metadata.get(EXPORTED_TARGET_KEY, ""), version=metadata.get(EXPORTED_VERSION_KEY, "")
    )


def check_manifest(found: WeightsManifest, expected: WeightsManifest) -> None:
    """Raises BadWeightsError naming the first thing that differs from the draft that is resident."""
    missing = sorted(expected.tensors.keys() - found.tensors.keys())
    unknown = sorted(found.tensors.keys() - expected.tensors.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"holds {unknown[0]}, which the draft does not have"
        raise BadWeightsError(f"The file {what}; it is another model's.")
    for name, (dtype, shape) in sorted(expected.tensors.items()):
        found_dtype, found_shape = found.tensors[name]
        if found_shape != shape:
            raise BadWeightsError(f"{name} has shape {list(found_shape)}, and the draft's is {list(shape)}.")
        if found_dtype != dtype:
            raise BadWeightsError(f"{name} is {found_dtype}, and the draft's is {dtype}.")
    if found.target != expected.target:
        raise BadWeightsError(
            f"The file was trained for target {found.target or 'unknown'}, and this one is {expected.target}."
        )
