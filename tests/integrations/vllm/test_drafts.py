"""The learner's drafts as vLLM takes them, with a tiny model on disk."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from livedraft.config import SpeculationConfig
from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import file_sha256, save_draft
from livedraft.integrations.vllm.drafts import exported, first_version, read_target, remove_old, target_folder
from livedraft.integrations.vllm.wire import check_manifest, read_manifest
from livedraft.models.load import load_model
from livedraft.records import UserError
from tests.hf_folder import TEXT_CONFIG, write_text_model

SPECULATION = SpeculationConfig(num_draft_layers=1, draft_vocabulary_size=64)


@pytest.fixture(scope="module")
def target(model_folder):
    return read_target(model_folder, SPECULATION)


def test_only_what_a_draft_needs_of_the_target_stays_in_memory(target, model_folder):
    whole = load_model(model_folder, torch.float32)
    assert target.fingerprint == whole.fingerprint
    assert {name.split(".")[2] for name in target.first_layers.tensors if "layers" in name} == {"0"}
    assert target_folder(model_folder, model_folder / "nowhere") == model_folder


def test_a_fresh_state_begins_with_the_targets_layers_and_goes_on_with_what_it_has(target, tmp_path):
    registry = Registry(tmp_path)
    first = first_version(registry, target, "auto", SPECULATION)
    assert (first.num_layers, first.vocabulary_size) == (1, 64)
    assert registry.in_service("default").id == first.id
    assert first_version(registry, target, "auto", SPECULATION).id == first.id


def test_drafts_of_another_target_are_refused(target, tmp_path):
    registry = Registry(tmp_path)
    first_version(registry, target, "none", SPECULATION)
    other = dataclasses.replace(target, fingerprint="other")
    with pytest.raises(UserError, match="trained for another target"):
        first_version(registry, other, "auto", SPECULATION)


def test_a_small_models_folder_is_a_draft_when_it_fits(target, tmp_path):
    small = write_text_model(tmp_path / "small", dataclasses.replace(TEXT_CONFIG, num_layers=2), seed=4)
    registry = Registry(tmp_path / "state")
    first = first_version(registry, target, str(small), SPECULATION)
    found = load_file(exported(registry, first.id, target).file)
    torch.testing.assert_close(
        found["model.embed_tokens.weight"],
        load_file(small / "model.safetensors")["model.embed_tokens.weight"].bfloat16(),
    )
    wide = write_text_model(tmp_path / "wide", dataclasses.replace(TEXT_CONFIG, vocabulary_size=300))
    with pytest.raises(UserError, match="vocabulary size"):
        first_version(Registry(tmp_path / "other"), target, str(wide), SPECULATION)
    with pytest.raises(UserError, match="There is no draft 'nonsense'"):
        first_version(Registry(tmp_path / "other"), target, "nonsense", SPECULATION)


def test_every_version_of_a_state_has_the_shape_of_the_first(target, tmp_path):
    """vLLM cannot take another shape without a restart."""
    registry = Registry(tmp_path)
    first = first_version(registry, target, "auto", SPECULATION)
    one = exported(registry, first.id, target)
    assert one.sha256 == file_sha256(one.file)
    manifest = read_manifest(one.file)
    assert (manifest.target, manifest.version) == (target.fingerprint, first.id)
    weights = registry.load(first)
    weights.tensors["head"] = weights.tensors["head"][:50]
    weights.draft_to_target_W = weights.draft_to_target_W[:50]
    smaller = dataclasses.replace(first, id="v1", parent=first.id, vocabulary_size=50)
    registry.publish(lambda path: save_draft(weights, path), smaller)
    check_manifest(read_manifest(exported(registry, "v1", target).file), manifest)


def test_an_export_cut_short_is_done_again_and_old_ones_go(target, tmp_path):
    registry = Registry(tmp_path)
    first = first_version(registry, target, "auto", SPECULATION)
    one = exported(registry, first.id, target)
    expected = read_manifest(one.file)
    (one.folder / "sha256").unlink()  # a crash before the last file
    save_file({"a": torch.zeros(1)}, one.file)
    again = exported(registry, first.id, target)
    assert again.sha256 == file_sha256(again.file)  # (safetensors writes its metadata in any order)
    check_manifest(read_manifest(again.file), expected)
    for number in range(1, 6):
        (one.folder.parent / f"v{number}").mkdir()
    remove_old(registry, {first.id, "v1"})
    left = {folder.name for folder in one.folder.parent.iterdir()}
    assert {first.id, "v1"} <= left and len(left) == 5
