import pytest
import torch
from safetensors.torch import save_file

from livedraft.integrations.vllm.wire import BadWeightsError, check_manifest, pack, read_manifest, unpack
from tests.integrations.vllm.tapped import tapped


def test_requests_come_out_as_they_went_in():
    plain = {
        name: torch.empty(0, dtype=value.dtype) for name, value in vars(tapped()).items() if name.startswith("drafted")
    }
    requests = [tapped(), tapped("b", (4, 5, 6, 7, 9)), tapped("c", (4,), **plain)]
    found = unpack(pack(requests))
    for one, other in zip(requests, found, strict=True):
        for name, value in vars(one).items():
            theirs = getattr(other, name)
            assert torch.equal(value, theirs) if isinstance(value, torch.Tensor) else value == theirs, name


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b"\xff" * 64, lambda b: b[:-3], lambda b: b[40:], lambda b: b"{}"]
)
def test_what_is_no_shipment_is_refused(damage):
    with pytest.raises(ValueError, match="no tapped requests"):
        unpack(damage(pack([tapped()])))


def test_another_protocol_is_refused():
    with pytest.raises(ValueError, match="protocol 7"):
        unpack(pack([tapped()]).replace(b'"protocol":"1"', b'"protocol":"7"'))


def test_lengths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="no tapped requests"):
        unpack(pack([tapped()]).replace(b'\\"lengths\\": [2, 3, 3]', b'\\"lengths\\": [2, 2, 3]'))


def test_a_file_is_known_by_its_header(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(
        {"a": torch.zeros(2, 3), "b": torch.zeros(1)},
        path,
        metadata={"livedraft_target": "t", "livedraft_version": "v"},
    )
    manifest = read_manifest(path)
    assert manifest.tensors == {"a": ("F32", (2, 3)), "b": ("F32", (1,))}
    assert (manifest.target, manifest.version) == ("t", "v")
    check_manifest(manifest, manifest)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadWeightsError, match=r"model\.safetensors is missing, damaged"):
        read_manifest(path)
    with pytest.raises(BadWeightsError, match="missing"):
        read_manifest(tmp_path / "none")
