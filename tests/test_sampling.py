import pytest
import torch

from livedraft.records import SamplingParams
from livedraft.sampling import draw, gumbel_noise, logits_to_probs

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
PROBS = LOGITS.softmax(-1)


def kept(**options):
    return (logits_to_probs(LOGITS, SamplingParams(temperature=1.0, **options))[0] > 0).tolist()


def test_filters_keep_what_they_should():
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_k=9) == [True] * 4
    assert kept(top_p=PROBS[0, 0].item() - 1e-3) == [True, False, False, False]
    assert kept(top_p=PROBS[0, 0].item() + 1e-3) == [True, True, False, False]
    assert kept(min_p=0.3) == [True, True, False, False]  # e**-1 is 0.37 of the maximum, e**-2 0.14
    assert logits_to_probs(LOGITS, SamplingParams(temperature=1.0, top_k=2)).sum().item() == pytest.approx(1.0)


def test_temperature_scales_and_a_tiny_one_does_not_overflow():
    assert torch.allclose(logits_to_probs(LOGITS, SamplingParams(temperature=2.0)), (LOGITS / 2).softmax(-1), atol=1e-6)
    assert logits_to_probs(1e4 * LOGITS, SamplingParams(temperature=1e-6)).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_top_p_with_equal_logits_keeps_the_lowest_ids():
    probs = logits_to_probs(torch.zeros(1, 4), SamplingParams(temperature=1.0, top_p=0.5))
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_draw_never_returns_a_token_without_mass():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(probs, u) for u in (0.0, 0.2499, 0.25, 0.999999, 1.0)] == [1, 1, 3, 3, 3]


def test_noise_of_a_token_does_not_depend_on_what_else_is_drawn():
    one = gumbel_noise(4, [2], 100)
    many = gumbel_noise(4, [1, 2, 3], 100)
    assert torch.equal(one[0], many[1])
    assert abs(gumbel_noise(0, range(50), 2000).mean().item() - 0.5772) < 0.02  # Euler's constant


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_options_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**options)


@pytest.mark.parametrize("temperature", [1e-7, 1e-46, 1e-300])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature):
    sampling = SamplingParams(temperature=temperature)
    assert sampling.is_greedy
    assert logits_to_probs(LOGITS, sampling).tolist() == [[1.0, 0.0, 0.0, 0.0]]
