import pytest
import torch

from livedraft.bench.reference import transformers_model
from livedraft.device import cpu_has_bf16_instructions
from livedraft.models.decoder import GatedLinear, Linear, PackedGatedLinear, PackedLinear, rms_norm
from livedraft.models.kv_cache import split_into_segments
from tests.tiny import FAMILIES, PROMPTS, VOCABULARY_SIZE, decoder, random_model


def run_whole(model_decoder, token_ids, slot=0):
    rows = list(range(len(token_ids)))
    return model_decoder.forward(token_ids, rows, [slot] * len(rows), rows).logits_RV


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name):
    model = random_model(FAMILIES[name])
    token_ids = torch.arange(60) * 7 % VOCABULARY_SIZE
    with torch.inference_mode():
        reference = transformers_model(model.tensors, model.config, torch.float32)(token_ids[None]).logits[0]
    ours = run_whole(decoder(model), token_ids.tolist())
    assert (ours - reference).abs().max() <= 1e-4 * max(1.0, reference.abs().max().item())


def test_ragged_batch_equals_one_at_a_time():
    """Different lengths, different row counts, scattered slots, and a segment longer than the padded limit."""
    model = random_model()
    prompts = [[1, 2, 3], list(range(50)), [9], [4, 5]]
    slots = [3, 0, 1, 2]
    alone = [run_whole(decoder(model), prompt)[-1] for prompt in prompts]
    together = decoder(model)
    rows = [(token, position, slot) for p, slot in zip(prompts, slots) for position, token in enumerate(p)]
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    logits = together.forward(*map(list, zip(*rows)), ends.tolist()).logits_RV
    assert torch.allclose(logits, torch.stack(alone), atol=1e-4)
    # Next round: one row each but three for slot 0, over caches of different lengths.
    follow = [([8], 3), ([6, 7, 8], 0), ([5], 1), ([1], 2)]
    expected = [run_whole(decoder(model), prompt + more)[len(prompt) :] for prompt, (more, _) in zip(prompts, follow)]
    rows = [
        (token, len(prompt) + offset, slot)
        for prompt, (more, slot) in zip(prompts, follow)
        for offset, token in enumerate(more)
    ]
    logits = together.forward(*map(list, zip(*rows)), list(range(len(rows)))).logits_RV
    assert torch.allclose(logits, torch.cat(expected), atol=1e-4)


def test_chunked_prefill_equals_whole():
    model = random_model()
    token_ids = [(3 * i) % VOCABULARY_SIZE for i in range(90)]
    whole = run_whole(decoder(model), token_ids)[-1]
    chunked = decoder(model)
    for start, end in ((0, 40), (40, 41), (41, 90)):
        rows = list(range(start, end))
        logits = chunked.forward(token_ids[start:end], rows, [2] * len(rows), [len(rows) - 1]).logits_RV
    assert torch.allclose(logits[0], whole, atol=1e-4)


def test_rewind_forgets_what_was_written_past_the_length():
    model = random_model()
    rewound = decoder(model)
    run_whole(rewound, [1, 2, 3, 50, 51, 52])  # three tokens too many
    logits = rewound.forward([4], [3], [0], [0]).logits_RV
    assert torch.allclose(logits[0], run_whole(decoder(model), [1, 2, 3, 4])[-1], atol=1e-4)


def test_only_the_rows_asked_for_have_logits():
    model_decoder = decoder(random_model())
    assert model_decoder.forward([1, 2], [0, 1], [0, 0], []).logits_RV.shape == (0, VOCABULARY_SIZE)
    assert model_decoder.forward([3], [2], [0], [0]).logits_RV.dtype is torch.float32


def test_segments_refuse_gaps_and_scattered_slots():
    assert [s.length for s in split_into_segments([0, 1, 5], [0, 0, 1])] == [2, 6]
    with pytest.raises(AssertionError):
        split_into_segments([0, 2], [0, 0])
    with pytest.raises(AssertionError):
        split_into_segments([0, 0, 1], [0, 1, 0])


@pytest.mark.skipif(not cpu_has_bf16_instructions(), reason="the packed path is chosen only on CPUs with bf16")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_packed_linear_equals_its_slow_twin(num_rows, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 96).bfloat16(), torch.randn(80, 96).bfloat16()
    bias = torch.randn(80).bfloat16() if has_bias else None
    residual = torch.randn(num_rows, 80).bfloat16()
    with torch.inference_mode():
        for extra in (None, residual):
            slow, fast = Linear(weight, bias)(x, extra), PackedLinear(weight, bias)(x, extra)
            assert torch.allclose(slow.float(), fast.float(), rtol=2e-2, atol=0.15)


@pytest.mark.skipif(not cpu_has_bf16_instructions(), reason="the packed path is chosen only on CPUs with bf16")
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_packed_gate_equals_its_slow_twin(num_rows):
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 96).bfloat16(), 0.1 * torch.randn(128, 96).bfloat16()
    with torch.inference_mode():
        slow, fast = GatedLinear(weight)(x), PackedGatedLinear(weight)(x)
    assert fast.shape == (num_rows, 64)
    assert torch.allclose(slow.float(), fast.float(), rtol=3e-2, atol=0.02)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_fast_norm_equals_its_slow_twin(dtype, tolerance):
    x, weight = torch.randn(5, 96).to(dtype), (1 + 0.1 * torch.randn(96)).to(dtype)
    slow = rms_norm(x, weight, 1e-5)
    with torch.inference_mode():
        fast = rms_norm(x, weight, 1e-5)
    assert fast.dtype is dtype
    assert torch.allclose(slow.float(), fast.float(), rtol=tolerance, atol=tolerance)


def test_batch_order_of_prompts_does_not_matter():
    model = random_model()
    first, second = decoder(model), decoder(model)
    a = [(t, i, 0) for i, t in enumerate(PROMPTS[0])]
    b = [(t, i, 1) for i, t in enumerate(PROMPTS[1])]
    one = first.forward(*map(list, zip(*(a + b))), [len(a) - 1]).logits_RV
    other = second.forward(*map(list, zip(*(b + a))), [len(a) + len(b) - 1]).logits_RV
    assert torch.allclose(one, other, atol=1e-5)
