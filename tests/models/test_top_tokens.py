"""The compiled search for a row's most likely tokens against torch's, its slow twin."""

import math

import pytest
import torch

from livedraft.models import top_tokens as room
from livedraft.models.native import kernels
from livedraft.models.top_tokens import (
    best_tokens,
    best_tokens_by_torch,
    probabilities_by_torch,
    probabilities_of,
    top_tokens,
    top_tokens_by_torch,
)

COMPILED = pytest.mark.skipif(kernels() is None, reason="no kernels here")


def same(blocks, num_wanted, num_top):
    ours, torchs = (make(blocks, num_wanted, num_top) for make in (top_tokens, top_tokens_by_torch))
    assert ours.token_ids_CK.dtype == torchs.token_ids_CK.dtype == torch.int32
    torch.testing.assert_close(ours.log_probs_CK, torchs.log_probs_CK)  # of halves
    torch.testing.assert_close(ours.tail_mass_C, torchs.tail_mass_C, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.normalisers_R, torchs.normalisers_R, rtol=1e-6, atol=4e-6)
    return ours, torchs


@COMPILED
@pytest.mark.parametrize("size", [3, 64, 65, 203, 4099, 49152])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_as_torch_finds_them(size, spread):
    generator = torch.Generator().manual_seed(size)
    blocks = [spread * torch.randn(rows, size, generator=generator) for rows in (1, 5, 3)]
    ours, torchs = same(blocks, [1, 2, 3], 64)
    assert ours.token_ids_CK.shape == (6, min(64, size))
    assert torch.equal(ours.token_ids_CK, torchs.token_ids_CK)


@COMPILED
def test_slices_of_larger_tensors_and_rows_apart():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 500, generator=generator)
    ours, torchs = same([whole[1:3, :400], whole[::2, :400]], [2, 0], 8)
    assert torch.equal(ours.token_ids_CK, torchs.token_ids_CK)
    assert ours.normalisers_R.shape == (5,)


@COMPILED
def test_equal_logits_come_in_the_order_of_their_tokens():
    ours = top_tokens([torch.zeros(1, 300)], [1], 10)
    assert ours.token_ids_CK.tolist() == [list(range(10))]
    assert ours.normalisers_R.item() == pytest.approx(math.log(300))


@COMPILED
def test_what_is_forbidden_has_no_probability():
    """A runtime may pad its vocabulary with minus infinity."""
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 250]] = torch.tensor([1.0, 2.0])
    ours, _ = same([logits], [1], 4)
    assert ours.token_ids_CK[0, :2].tolist() == [250, 7]
    assert ours.log_probs_CK[0, 2:].tolist() == [-math.inf, -math.inf]


@COMPILED
@pytest.mark.parametrize("size", [3, 64, 65, 203, 4099, 49152])
def test_the_best_token_is_torchs(size):
    generator = torch.Generator().manual_seed(size)
    blocks = [torch.randn(rows, size, generator=generator) for rows in (1, 4)]
    assert best_tokens(blocks) == best_tokens_by_torch(blocks)
    tied = [torch.randint(0, 3, (8, size), generator=generator).float()]  # the first of equal ones
    assert best_tokens(tied) == best_tokens_by_torch(tied)


@COMPILED
@pytest.mark.parametrize("place", [0, 130, 202])
def test_a_row_with_a_nan_has_it_as_its_best(place):
    """The engine fails such a request, and must see it wherever it stands."""
    logits = torch.randn(2, 203)
    logits[0, place] = torch.nan
    values, tokens = best_tokens([logits])
    assert math.isnan(values[0]) and values[1] == logits[1].max()
    assert tokens[1] == logits[1].argmax()
    assert 0 <= tokens[0] < 203
    assert best_tokens([torch.full((1, 70), -torch.inf)]) == ([-math.inf], [0])


@COMPILED
@pytest.mark.parametrize("size", [3, 203, 8192])
def test_the_probability_of_a_token_is_torchs(size):
    """Also of slices of wider rows, as a draft's padded head gives them, and of forbidden tokens."""
    generator = torch.Generator().manual_seed(size)
    rows = (3.0 * torch.randn(4, size + 5, generator=generator))[:, :size]
    rows[1, 0] = -torch.inf
    drawn = [size - 1, 0, 1, int(rows[3].argmax())]
    ours = probabilities_of(rows, drawn)
    assert ours == pytest.approx(probabilities_by_torch(rows, drawn), rel=1e-5)
    assert ours == pytest.approx([rows[row].softmax(-1)[token].item() for row, token in enumerate(drawn)], rel=1e-5)
    assert ours[1] == 0.0


def test_without_kernels_torch_finds_them(monkeypatch):
    monkeypatch.setattr(room, "kernels", lambda: None)
    found = top_tokens([torch.tensor([[0.0, 2.0, 1.0]])], [1], 2)
    assert found.token_ids_CK.tolist() == [[1, 2]]
    assert best_tokens([torch.tensor([[0.0, 2.0, 1.0]])]) == ([2.0], [1])
    assert probabilities_of(torch.tensor([[0.0, math.log(3.0)]]), [1]) == pytest.approx([0.75])
