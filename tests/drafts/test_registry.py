import json

import pytest
import torch

from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import check_against_target, draft_from_target, load_draft, lowest_token_ids, save_draft
from livedraft.records import DraftVersion, UserError
from tests.tiny import TINY, decoder, draft_model, random_model

MODEL = random_model()
DRAFT = draft_from_target(MODEL, num_layers=1, token_ids=[3, 1, 40])


def version(number=0, **fields):
    defaults = {"route": "default", "parent": None, "sha256": "", "target_fingerprint": MODEL.fingerprint}
    return DraftVersion(
        id=new_version_id(number),
        tokenizer_fingerprint="t",
        num_layers=1,
        vocabulary_size=3,
        created_at=float(number),
        **{**defaults, **fields},
    )


def publish(registry, number=0, status="candidate"):
    return registry.publish(lambda path: save_draft(DRAFT, path), version(number), status)


def test_a_version_is_a_folder_with_manifest_and_weights(tmp_path):
    registry = Registry(tmp_path)
    made = publish(registry)
    manifest = json.loads((registry.folder(made.id) / "manifest.json").read_text())
    assert DraftVersion(**manifest) == made
    loaded = load_draft(registry.weights_path(made.id))
    assert loaded.draft_to_target_W.tolist() == [1, 3, 40]
    assert all(torch.equal(loaded.tensors[name], DRAFT.tensors[name]) for name in DRAFT.tensors)


def test_exactly_one_version_serves_a_route(tmp_path):
    registry = Registry(tmp_path)
    assert registry.in_service("default") is None
    first, second, third = publish(registry, 0, "in_service"), publish(registry, 1), publish(registry, 2)
    registry.serve(second.id, "default", {"reason": "better"})
    registry.reject(third.id, {"reason": "worse"})
    assert registry.in_service("default") == second
    assert registry.in_service("other") is None
    rows = {row["id"]: row for row in registry.versions("default")}
    assert [rows[v.id]["status"] for v in (first, second, third)] == ["retired", "in_service", "rejected"]
    assert rows[third.id]["decision"] == {"reason": "worse"}
    assert not registry.folder(third.id).exists()


def test_a_failed_write_leaves_nothing(tmp_path):
    registry = Registry(tmp_path)

    def full_disk(_path):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        registry.publish(full_disk, version())
    assert list(registry.drafts_folder.iterdir()) == []
    assert registry.versions() == []


def test_draft_from_target_is_its_first_layers_and_rows():
    served = draft_model(DRAFT, decoder(MODEL))
    whole = draft_model(draft_from_target(MODEL, num_layers=1, token_ids=list(range(64))), decoder(MODEL))
    rows = list(range(6))
    trimmed, full = (d.decoder.forward(rows, rows, [0] * 6, rows).logits_RV for d in (served, whole))
    assert torch.allclose(trimmed, full[:, [1, 3, 40]], atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama tied"])
def test_whole_target_as_draft_gives_the_targets_logits(family):
    from tests.tiny import FAMILIES

    model = random_model(FAMILIES[family])
    target = decoder(model)
    draft = draft_model(draft_from_target(model, num_layers=3, token_ids=list(range(64))), target)
    rows = list(range(9))
    one, other = (d.forward(rows, rows, [0] * 9, rows).logits_RV for d in (target, draft.decoder))
    assert torch.allclose(one, other, atol=1e-5)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="num_draft_layers is 9"):
        draft_from_target(MODEL, num_layers=9, token_ids=[1])
    with pytest.raises(ValueError, match="token ids"):
        draft_from_target(MODEL, num_layers=1, token_ids=[64])
    other = draft_from_target(random_model(TINY), num_layers=1, token_ids=[1, 2])
    other.tensors["head"] = other.tensors["head"][:, :5]
    with pytest.raises(UserError, match="head should have shape"):
        check_against_target(other, TINY, "Draft x")
    assert lowest_token_ids(10, 20) == list(range(10))


def test_damaged_weights_are_one_sentence(tmp_path):
    path = tmp_path / "draft.safetensors"
    with pytest.raises(UserError, match="damaged or no draft"):
        load_draft(path)
    save_draft(DRAFT, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="damaged or no draft"):
        load_draft(path)
