"""What is recorded could run on a GPU without the host: everything in it lives on one device that has no values to read.

On the meta device reading a number back raises, and so does a shape that depends on data; that no tensor of the host and no
operation that waits is among what runs is looked at one by one.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from livedraft.device import ExecutionPath
from livedraft.drafts.weights import draft_from_target, serving_weights
from livedraft.models import static_decoder
from livedraft.models.graphs import EagerReplay
from livedraft.models.load import build_weights
from livedraft.models.static_decoder import StaticDecoder, attend_by_matmul
from livedraft.speculation import draft_loop
from livedraft.speculation.draft_loop import DraftLoop
from tests.tiny import FAMILIES, random_model

META = torch.device("meta")
WAITS_OR_DRAWS = (
    "_local_scalar",
    "nonzero",
    "masked_select",
    "unique",
    "pin_memory",
    "rand",
    "normal",
    "exponential",
    "item",
)


class OnOneDevice(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device == META, operation
        self.operations.add(str(operation))
        return result


class NoHost:
    def __init__(self, size, dtype, device):
        self.on_device = torch.zeros(size, dtype=dtype, device=device)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def loop(request, monkeypatch):
    for room in (static_decoder, draft_loop):
        monkeypatch.setattr(room, "StaticInput", NoHost)
    monkeypatch.setattr(DraftLoop, "load", lambda *rest: None)
    model = random_model(FAMILIES[request.param])
    tensors = {name: torch.empty(t.shape, dtype=torch.bfloat16, device=META) for name, t in model.tensors.items()}
    model = replace(model, tensors=tensors)
    path = ExecutionPath(device=META, dtype=torch.bfloat16, is_prepacked=False, is_graphed=True)
    target = StaticDecoder(
        model.config, build_weights(model, path), num_slots=4, max_length=64, dtype=path.dtype, device=META,
        capture=EagerReplay(),
    )  # fmt: skip
    draft = draft_from_target(model, num_layers=2, token_ids=list(range(40)))
    weights = serving_weights(draft, target.weights, path, model.config)
    return DraftLoop(model.config, weights, target, draft.draft_to_target_W)


def test_nothing_recorded_needs_the_host(loop):
    with OnOneDevice() as seen:
        loop.decoder._step(4, 3, 64)
        loop._loop(1, 4, 2, 64)
        loop.decoder.attention = "", attend_by_matmul
        loop.decoder._step(1, 1, 64)
        loop._loop(2, 4, 2, 64)
    assert len(seen.operations) > 20
    assert not [name for name in seen.operations if any(word in name for word in WAITS_OR_DRAWS)]


def test_reading_back_would_be_noticed(loop):
    with pytest.raises((RuntimeError, NotImplementedError)), OnOneDevice():
        loop.decoder._logits_NV.max().item()
    with pytest.raises((RuntimeError, AssertionError)), OnOneDevice():
        loop.decoder._logits_NV + torch.ones(loop.decoder._logits_NV.shape)
