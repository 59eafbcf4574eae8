import pytest
import torch

from livedraft.device import choose_execution_path, device_errors, on_device
from livedraft.records import UserError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_a_gpu_that_is_not_there_is_the_users_matter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"no CUDA device; use cpu, or install"):
        choose_execution_path(device="cuda")


def test_where_there_is_a_gpu_it_is_taken_with_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = choose_execution_path()
    assert (path.device.type, path.dtype, path.is_graphed) == ("cuda", torch.bfloat16, True)
    assert "CUDA graphs" in path.description
    assert choose_execution_path(device="cpu").device == CPU


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "too little free memory; lower max_num_seqs"),
        (
            RuntimeError("CUDA error: no kernel image\nmore"),
            r"failed \(CUDA error: no kernel image\); check its driver",
        ),
    ],
)
def test_what_a_gpu_raises_at_start_is_a_sentence(error, sentence):
    with pytest.raises(UserError, match=sentence), device_errors(CUDA):
        raise error


@pytest.mark.parametrize(("device", "text"), [(CPU, "CUDA error: x"), (CUDA, "something else")])
def test_other_errors_pass(device, text):
    with pytest.raises(RuntimeError, match=text), device_errors(device):
        raise RuntimeError(text)


def test_numbers_on_the_cpu():
    assert on_device([1, 2], CPU).tolist() == [1, 2]
    assert on_device([1, 2], CPU).dtype is torch.int64
