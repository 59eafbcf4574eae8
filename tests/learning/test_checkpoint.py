import pytest
import torch
from safetensors import SafetensorError

from livedraft.learning import checkpoint as room
from livedraft.learning.checkpoint import read_checkpoint, write_checkpoint


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    write_checkpoint(path, {"a": torch.arange(6).view(2, 3).T}, {"step": 3})
    tensors, counters = read_checkpoint(path)
    assert torch.equal(tensors["a"], torch.arange(6).view(2, 3).T)
    assert counters == {"step": 3}
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    write_checkpoint(path, {"a": torch.zeros(2)}, {"step": 1})

    def full(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "fsync_path", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(path, {"a": torch.ones(2)}, {"step": 2})
    assert read_checkpoint(path)[1] == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_checkpoint_is_said(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises((SafetensorError, OSError)):
        read_checkpoint(tmp_path / "bad")
