from types import SimpleNamespace

import torch

from livedraft.integrations.vllm.sampling_guard import expand_batch_to_tokens, guard, spreads_rightly


def broken(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """As vLLM's CPU build has it: memory that nobody wrote."""
    return torch.full((num_tokens,), 7.0, dtype=x.dtype)


def test_the_real_thing_is_found_broken_and_replaced():
    module = SimpleNamespace(expand_batch_to_tokens=broken)
    assert guard(module) == "repaired"
    assert module.expand_batch_to_tokens is expand_batch_to_tokens
    assert guard(module) == "fine"


def test_another_signature_is_no_reason_to_crash():
    assert not spreads_rightly(lambda x: x)


def test_values_are_spread_and_replaced():
    found = expand_batch_to_tokens(torch.tensor([1.5, 0.0, 2.0]), torch.tensor([2, 2, 3], dtype=torch.int32), 3, 0, 1)
    assert found.tolist() == [1.5, 1.5, 2.0]
    zero = expand_batch_to_tokens(torch.tensor([0, 4]), torch.tensor([1, 3], dtype=torch.int32), 3, 0, 1)
    assert zero.tolist() == [1, 4, 4]
