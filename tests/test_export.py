"""Drafts for other engines: transformers loads and uses one, a GGUF file has the same numbers, a version comes back in."""

import dataclasses
import json
import shutil
from unittest import mock

import pytest
import torch
import transformers

from livedraft import LLM, SamplingParams
from livedraft import export as export_module
from livedraft.config import SpeculationConfig
from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import draft_from_target
from livedraft.export import MAX_ABSENT_MASS, export_draft, import_draft
from livedraft.learning.forward import TargetParts, forward_of
from livedraft.models.load import load_model
from livedraft.records import UserError

PROMPTS = [f"question number {n}" for n in range(8)]


@pytest.fixture(scope="module")
def state(model_folder, tmp_path_factory):
    """A server's folder: its first version knows 150 of 258 tokens; eight traces."""
    folder = tmp_path_factory.mktemp("export") / "state"
    with LLM(
        str(model_folder), state=folder, learn=True, dtype="float32", num_threads=1,
        speculation=SpeculationConfig(draft_vocabulary_size=150),
    ) as llm:  # fmt: skip
        llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    return folder


@pytest.fixture(scope="module")
def exported(state, model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "draft"
    registry = Registry(state)
    return folder, export_draft(registry, registry.in_service("default").id, model_folder, folder, format="hf")


def test_transformers_gives_the_drafts_logits_and_next_to_nothing_to_the_rest(state, model_folder, exported):
    folder, done = exported
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    registry = Registry(state)
    draft = registry.load(registry.in_service("default"))
    forward = forward_of(draft, TargetParts.load(model_folder, draft), 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        logits = hf_model(ids).logits[0]
        own = forward.head(forward.hidden(ids))
    found = logits[:, draft.draft_to_target_W]
    assert (found - own).abs().mean() < 0.02 * own.abs().mean()  # it is stored in bf16
    # Random hidden states have no direction in common; a real model's do (below). What is reported must be true either way.
    known = logits.softmax(-1)[:, draft.draft_to_target_W].sum(-1)
    assert float(1 - known.mean()) == pytest.approx(done.absent_mass, abs=0.15)
    card = (folder / "README.md").read_text()
    assert registry.in_service("default").id in card
    assert f"{done.absent_mass:.3%}" in card


def test_transformers_uses_it_as_its_assistant_and_answers_the_same(model_folder, exported):
    folder, _ = exported
    target = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assistant = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPTS[1], return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 257, "eos_token_id": 257}
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=assistant), plain)


def test_a_version_comes_back_in_and_foreign_ones_do_not(state, model_folder, tmp_path):
    registry = Registry(state)
    serving = registry.in_service("default")
    folder = tmp_path / "elsewhere"
    shutil.copytree(registry.folder(serving.id), folder)
    trained = json.loads((folder / "manifest.json").read_text()) | {"num_requests_seen": 300}
    (folder / "manifest.json").write_text(json.dumps(trained))
    version = import_draft(registry, folder, model_folder)
    registry.reject_candidates("default")  # as a starting trainer does with what it will never test
    assert registry.version(version.id)["status"] == "imported"
    assert torch.equal(registry.load(version).tensors["head"], registry.load(serving).tensors["head"])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"target_fingerprint": "another"}))
    with pytest.raises(UserError, match="another target"):
        import_draft(registry, folder, model_folder)
    (folder / "draft.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged or no draft"):
        import_draft(registry, folder, model_folder)


def test_what_is_cut_short_leaves_no_half_model_and_a_second_export_replaces_the_first(
    state, model_folder, tmp_path, monkeypatch
):
    registry, folder = Registry(state), tmp_path / "draft"
    serving = registry.in_service("default").id
    pressed = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export_module, "hf_config", pressed)  # after the weights are written
        export_draft(registry, serving, model_folder, folder, format="hf")
    assert list(tmp_path.iterdir()) == []
    export_draft(registry, serving, model_folder, folder, format="hf")
    (folder / "README.md").write_text("old")
    (folder / "notes.txt").write_text("somebody's own")
    export_draft(registry, serving, model_folder, folder, format="hf")
    assert serving in (folder / "README.md").read_text()
    assert (folder / "notes.txt").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_what_cannot_be_exported_is_one_sentence(state, model_folder, tmp_path):
    registry = Registry(state)
    serving = registry.in_service("default").id
    for version, format, words in (
        (serving, "pdf", "hf or gguf"),
        ("v9", "hf", "no version"),
        (serving, "gguf", "--format hf"),
    ):
        with pytest.raises(UserError, match=words):
            export_draft(registry, version, model_folder, tmp_path / "out", format=format)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        export_draft(registry, serving, model_folder, tmp_path / "file" / "out", format="hf")


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(240)
def test_the_gguf_file_has_the_numbers_of_the_folder(smollm2_path, tmp_path):
    with LLM("smollm2-135m", state=tmp_path / "state", learn=True, num_threads=1) as llm:
        version = llm.engine.draft_version
        llm.generate(["The capital of France is", "Plants need"], SamplingParams(max_tokens=24))
    registry = Registry(tmp_path / "state")
    done = export_draft(registry, version, smollm2_path, tmp_path / "draft.gguf", format="gguf")
    assert done.absent_mass is not None
    assert done.absent_mass < MAX_ABSENT_MASS
    export_draft(registry, version, smollm2_path, tmp_path / "hf", format="hf")
    from_gguf, from_hf = (load_model(path, torch.float32) for path in (tmp_path / "draft.gguf", tmp_path / "hf"))
    assert from_gguf.config == dataclasses.replace(from_hf.config, eos_token_ids=from_gguf.config.eos_token_ids)
    for name, tensor in from_hf.tensors.items():
        assert torch.equal(tensor, from_gguf.tensors[name]), name
    draft = draft_from_target(from_hf, num_layers=2, token_ids=[1, 2, 3])
    kept = registry.load(registry.in_service("default"))
    torch.testing.assert_close(
        draft.tensors["layers.1.gate_up.weight"], kept.tensors["layers.1.gate_up.weight"].bfloat16().float()
    )
