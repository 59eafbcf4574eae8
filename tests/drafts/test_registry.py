import json

import pytest
import torch

from livedraft.drafts.registry import NUM_KEPT_VERSIONS, Registry, new_version_id
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


def publish(registry, number=0, status="candidate", **fields):
    return registry.publish(lambda path: save_draft(DRAFT, path), version(number, **fields), status)


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
        check_against_target(other, TINY, "Draft x", TINY.vocabulary_size)
    assert lowest_token_ids(10, 20) == list(range(10))


def test_damaged_weights_are_one_sentence(tmp_path):
    path = tmp_path / "draft.safetensors"
    with pytest.raises(UserError, match="damaged or no draft"):
        load_draft(path)
    save_draft(DRAFT, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="damaged or no draft"):
        load_draft(path)


# --- canary, roll-back, crash ---------------------------------------------------------------------------------------


def statuses(registry):
    return {row["id"]: row["status"] for row in registry.versions()}


def test_numbers_of_gate_watch_and_operator_gather(tmp_path):
    registry = Registry(tmp_path)
    first, second = publish(registry, 0, "in_service"), publish(registry, 1, parent=None)
    registry.start_canary(second.id, {"alpha": 0.4, "promote": True})
    assert registry.canary("default").id == second.id
    assert registry.in_service("default").id == first.id
    registry.serve(second.id, "default", {"live_rate": 0.5})
    assert registry.version(second.id)["decision"] == {"alpha": 0.4, "promote": True, "live_rate": 0.5}
    assert registry.canary("default") is None
    assert statuses(registry) == {first.id: "retired", second.id: "in_service"}
    with pytest.raises(UserError, match="no version 'v9'"):
        registry.version("v9")


def test_a_roll_back_goes_past_versions_that_are_gone(tmp_path):
    registry = Registry(tmp_path)
    first = publish(registry, 0, "in_service")
    second = publish(registry, 1, parent=first.id)
    third = publish(registry, 2, parent=second.id)
    for version in (second, third):
        registry.serve(version.id, "default", {})
    registry.set_aside(second.id, "damaged")
    assert list(registry.drafts_folder.glob(f"{second.id}.damaged-*"))
    assert registry.roll_back("default", {"why": "slow"}).id == first.id
    assert statuses(registry) == {first.id: "in_service", second.id: "set_aside", third.id: "rolled_back"}
    assert registry.version(third.id)["decision"] == {"why": "slow"}
    with pytest.raises(UserError, match="no earlier version"):
        registry.roll_back("default", {})


def test_old_versions_leave_the_disk_and_keep_their_rows(tmp_path):
    registry = Registry(tmp_path)
    made = [publish(registry, 0, "in_service")]
    for number in range(1, NUM_KEPT_VERSIONS + 4):
        made.append(publish(registry, number, parent=made[-1].id))
        registry.serve(made[-1].id, "default", {})
    kept = [registry.folder(version.id).exists() for version in made]
    assert kept == [False] * 3 + [True] * (NUM_KEPT_VERSIONS + 1)
    assert len(registry.versions()) == len(made)
    assert registry.roll_back("default", {}).id == made[-2].id


def test_a_lost_database_is_rebuilt_from_folders_and_the_pointer(tmp_path):
    registry = Registry(tmp_path)
    first = publish(registry, 0, "in_service")
    second = publish(registry, 1, parent=first.id)
    registry.serve(second.id, "default", {})
    for path in tmp_path.glob("livedraft.db*"):
        path.unlink()
    (registry.drafts_folder / ".tmp-half").mkdir()
    (registry.drafts_folder / "foreign").mkdir()
    (registry.drafts_folder / "foreign" / "manifest.json").write_text("{}")
    assert set(registry.reconcile()) == {first.id, second.id}
    assert statuses(registry) == {first.id: "retired", second.id: "in_service"}
    assert registry.in_service("default") == second
    assert not (registry.drafts_folder / ".tmp-half").exists()
    assert registry.reconcile() == []


def test_weights_are_checked_before_anybody_uses_them(tmp_path):
    registry = Registry(tmp_path)
    made = publish(registry)
    assert registry.load(made).vocabulary_size == 3
    bad = registry.publish(lambda path: save_draft(with_nan(DRAFT), path), version(1))
    with pytest.raises(UserError, match="no numbers"):
        registry.load(bad)
    path = registry.weights_path(made.id)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="checksum"):
        registry.load(made)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        registry.load(made)


def with_nan(draft):
    tensors = {name: tensor.clone() for name, tensor in draft.tensors.items()}
    tensors["head"][0, 0] = torch.nan
    return type(draft)(tensors=tensors, draft_to_target_W=draft.draft_to_target_W)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    registry = Registry(tmp_path)

    def full(path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="could not be stored"):
        registry.publish(full, version())
    assert not list(registry.drafts_folder.iterdir())
    assert not registry.versions()


# --- three processes decide ------------------------------------------------------------------------------------------


def test_whoever_comes_second_changes_nothing(tmp_path):
    """Trainer, watch and operator may all decide on a version; a promoted one is neither rejected nor withdrawn."""
    registry = Registry(tmp_path)
    first = publish(registry, 0, "in_service")
    second = publish(registry, 1, parent=first.id)
    registry.serve(second.id, "default", {"promoted_by": "operator"})
    registry.reject(second.id, {"promote": False})  # the gate comes late
    assert not registry.withdraw(second.id, {})
    registry.start_canary(second.id, {})
    assert registry.in_service("default").id == second.id
    assert registry.folder(second.id).exists()
    third = publish(registry, 2, parent=second.id)
    registry.start_canary(third.id, {})
    assert registry.withdraw(third.id, {"rolled_back_by": "operator"})
    with pytest.raises(UserError, match="rolled_back by now"):  # the watch confirms late
        registry.serve(third.id, "default", {}, only_from=("canary",))
    assert registry.in_service("default").id == second.id


def test_a_roll_back_goes_to_what_served_before_not_to_the_parent(tmp_path):
    registry = Registry(tmp_path)
    first = publish(registry, 0, "in_service")
    worse = publish(registry, 1, parent=first.id)
    registry.serve(worse.id, "default", {})
    registry.serve(first.id, "default", {}, status_of_current="rolled_back")  # the watch
    third = publish(registry, 2, parent=worse.id)
    registry.serve(third.id, "default", {})
    assert registry.roll_back("default", {}).id == first.id


def test_a_version_whose_row_cannot_be_written_leaves_no_folder(tmp_path, monkeypatch):
    from livedraft.drafts import registry as room

    registry = Registry(tmp_path)

    def full(*arguments):
        raise room.sqlite3.OperationalError("disk full")

    monkeypatch.setattr(room, "_add_row", full)
    with pytest.raises(UserError, match="failed"):
        publish(registry)
    assert not list(registry.drafts_folder.iterdir())


@pytest.mark.parametrize(
    "name", ["layers.0.down.weight", "layers.0.attention_norm", "layers.0.gate_up.weight", "extra"]
)
def test_every_tensor_of_a_draft_is_checked(name):
    """The compiled kernels trust the shapes."""
    tensors = dict(DRAFT.tensors)
    tensors[name] = torch.zeros(3, 5)
    bad = type(DRAFT)(tensors=tensors, draft_to_target_W=DRAFT.draft_to_target_W)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        check_against_target(bad, TINY, "It", TINY.vocabulary_size)
    check_against_target(DRAFT, TINY, "It", TINY.vocabulary_size)
    with pytest.raises(UserError, match="names tokens"):
        check_against_target(DRAFT, TINY, "It", 40)
