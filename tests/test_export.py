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
from livedraft.bench.demo_stream import plant_shop_prompts
from livedraft.bench.reference import transformers_model
from livedraft.config import SpeculationConfig
from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import draft_from_target, save_draft
from livedraft.export import MAX_ABSENT_MASS, export_draft, import_draft
from livedraft.learning.forward import TargetParts, forward_of
from livedraft.models.load import load_model
from livedraft.records import DraftVersion, UserError
from livedraft.tokenizer import load_tokenizer
from tests.assisted import acceptance_rate
from tests.e2e.in_process import livedraft
from tests.hf_folder import TEXT_CONFIG, byte_tokenizer, write_hf_folder, write_text_model
from tests.models.test_load import write_gguf
from tests.tiny import FAMILIES, decoder, random_model

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
    assert "0 of the requests it may have learnt from are kept" in card  # a first version has learnt from none
    assert f"{done.absent_mass:.3%}" in card
    told = livedraft(
        "drafts", "export", registry.in_service("default").id, folder, "--state", state, "--model", model_folder, "--json"
    )  # fmt: skip
    assert json.loads(told.stdout)["absent_mass"] == pytest.approx(done.absent_mass)


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


def test_an_exported_folder_comes_back_in_as_the_draft_it_was(state, model_folder, exported, tmp_path):
    folder, _ = exported
    registry = Registry(state)
    kept = registry.load(registry.in_service("default"))
    back = registry.load(import_draft(registry, folder, model_folder))
    assert torch.equal(back.draft_to_target_W, kept.draft_to_target_W)
    assert back.tensors.keys() == kept.tensors.keys()  # the embedding is the target's again
    assert not back.is_whole_model
    for name, tensor in kept.tensors.items():
        assert torch.equal(back.tensors[name], tensor.bfloat16().float()), name
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    (elsewhere / "manifest.json").unlink()
    import_draft(registry, elsewhere, model_folder)  # by its tokenizer alone
    other = byte_tokenizer()
    other.add_tokens(["<other>"])
    other.save_pretrained(elsewhere)
    with pytest.raises(UserError, match="not the target's"):
        import_draft(registry, elsewhere, model_folder)
    (elsewhere / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        import_draft(registry, elsewhere, model_folder)


def test_a_whole_model_of_transformers_goes_out_and_comes_back(model_folder, tmp_path):
    """Its vocabulary is padded further than the target's, as Phi-2's is: what the padding gets is measured."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=272, num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=48,
        max_position_embeddings=512, eos_token_id=257,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    with LLM(
        str(model_folder),
        state=tmp_path / "state",
        learn=True,
        draft=str(tmp_path / "small"),
        dtype="float32",
        num_threads=1,
    ) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    registry = Registry(tmp_path / "state")
    serving = registry.in_service("default")
    folder = tmp_path / "hf"
    done = export_draft(registry, serving.id, model_folder, folder, format="hf")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draft = registry.load(serving)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(PROMPTS[0], return_tensors="pt").input_ids
    forward = forward_of(draft, TargetParts.load(model_folder, draft), 64)
    with torch.no_grad():
        logits = hf_model(ids).logits[0]
        own = forward.head(forward.hidden(ids))
    assert (logits[:, :258] - own).abs().mean() < 0.02 * own.abs().mean()  # it is stored in bf16
    assert done.absent_mass == pytest.approx(float(logits.softmax(-1)[:, 258:].sum(-1).mean()), abs=0.01)
    assert f"{done.absent_mass:.3%}" in (folder / "README.md").read_text()
    assert (done.num_layers, done.vocabulary_size) == (2, 272)
    back = registry.load(import_draft(registry, folder, model_folder))
    assert back.draft_to_target_W.tolist() == list(range(258))
    for name, tensor in draft.tensors.items():
        assert torch.equal(back.tensors[name], tensor.bfloat16().float()), name
    with pytest.raises(UserError, match="--format hf"):
        export_draft(registry, serving.id, model_folder, tmp_path / "x.gguf", format="gguf")


def test_a_whole_small_model_keeps_its_own_number_of_tokens(model_folder, tmp_path):
    small = write_text_model(
        tmp_path / "small", dataclasses.replace(TEXT_CONFIG, num_layers=1, vocabulary_size=264), seed=5
    )
    with LLM(
        str(model_folder), state=tmp_path / "state", learn=True, draft=str(small), dtype="float32", num_threads=1
    ) as llm:
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4))
    registry = Registry(tmp_path / "state")
    done = export_draft(registry, registry.in_service("default").id, model_folder, tmp_path / "hf", format="hf")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert (
        hf_model.lm_head.weight.shape[0] == hf_model.model.embed_tokens.weight.shape[0] == done.vocabulary_size == 264
    )
    back = registry.load(import_draft(registry, tmp_path / "hf", model_folder))
    assert back.config is not None
    assert back.config.num_layers == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_draft_has_the_logits_of_the_folder(tmp_path, family):
    config = FAMILIES[family]
    target = random_model(config)
    write_gguf(tmp_path / "target.gguf", config, target.tensors)
    write_hf_folder(tmp_path / "target", config, target.tensors)
    byte_tokenizer().save_pretrained(tmp_path / "target")
    source = tmp_path / "draft"
    source.mkdir()
    sha256 = save_draft(
        draft_from_target(target, num_layers=2, token_ids=list(range(40))), source / "draft.safetensors"
    )
    version = DraftVersion(
        id="distillspec", route="default", parent=None, sha256=sha256, target_fingerprint="t", tokenizer_fingerprint="k",
        num_layers=2, vocabulary_size=40, created_at=0.0,
    )  # fmt: skip
    (source / "manifest.json").write_text(json.dumps(dataclasses.asdict(version)))
    export_draft(None, str(source), tmp_path / "target.gguf", tmp_path / "draft.gguf", format="gguf")
    export_draft(None, str(source), tmp_path / "target", tmp_path / "hf", format="hf")
    assert sha256 in (tmp_path / "draft.gguf.md").read_text()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = [5, 9, 3, 60, 11, 2]
    with torch.no_grad():
        expected = hf_model(torch.tensor([ids])).logits[0]
    rows = list(range(len(ids)))
    found = (
        decoder(load_model(tmp_path / "draft.gguf", torch.float32)).forward(ids, rows, [0] * len(ids), rows).logits_RV
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


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


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(900)
def test_transformers_accepts_as_much_of_a_real_draft_as_is_accepted_here(smollm2_path, tmp_path):
    """By transformers' own count in its assisted generation, in float32 on both sides."""
    rows = plant_shop_prompts(56, seed=7)
    for name, some in (("learnt", rows[:48]), ("asked", rows[48:])):
        text = "".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in some)
        (tmp_path / f"{name}.jsonl").write_text(text)
    made = livedraft(
        "distill", "--prompts", tmp_path / "learnt.jsonl", "--method", "distillspec", "--epochs", 4, "--max-tokens", 48,
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    draft = tmp_path / "out" / "distillspec"
    done = livedraft("drafts", "export", draft, tmp_path / "hf", "--json")
    assert json.loads(done.stdout)["absent_mass"] < MAX_ABSENT_MASS
    ours = livedraft(
        "bench", "acceptance", "--prompts", tmp_path / "asked.jsonl", "--draft", draft, "--dtype", "float32",
        "--temperature", 0, "--max-tokens", 48, "--json",
    )  # fmt: skip
    rate = json.loads(ours.stdout)["temperature_0"]["acceptance_rate"]["mean"]
    loaded = load_model(smollm2_path, torch.float32)
    target = transformers_model(loaded.tensors, loaded.config, torch.float32)
    assistant = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = load_tokenizer(smollm2_path, loaded.config.eos_token_ids)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in rows[48:]]
    theirs = acceptance_rate(target, assistant, prompts, k=4, max_tokens=48, eos=tokenizer.eos_token_ids[0])
    assert rate > 0.1  # or agreeing means little
    assert theirs == pytest.approx(rate, abs=0.02)
