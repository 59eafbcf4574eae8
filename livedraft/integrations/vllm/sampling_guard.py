"""vLLM's CPU build samples speculated tokens with uninitialised temperatures; found, and mended, before anything is sampled.

Its stand-in for the kernel that spreads one value a request over that request's drafted tokens writes into a copy. Greedy
requests do not read the result. Runs inside vLLM.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

Finding = Literal["fine", "repaired", "broken"]


def guard(module: Any) -> Finding:
    """`module` is vLLM's rejection sampler. "broken": the test fails even with our version in its place."""
    if spreads_rightly(module.expand_batch_to_tokens):
        return "fine"
    module.expand_batch_to_tokens = expand_batch_to_tokens
    return "repaired" if spreads_rightly(module.expand_batch_to_tokens) else "broken"


def spreads_rightly(expand: Any) -> bool:
    """With values of both types in use, several times over: memory that was never written may be right by chance."""
    for seed in range(8):
        values = torch.tensor([0.25 + seed, 0.0, 3.5])
        cumulated = torch.tensor([2, 3, 7], dtype=torch.int32)
        expected = values[[0, 0, 1, 2, 2, 2, 2]]
        counts = torch.tensor([17 + seed, 0, 3], dtype=torch.int64)
        try:
            found = expand(values, cumulated, 7)
            replaced = expand(values, cumulated, 7, replace_from=0, replace_to=1)
            found_counts = expand(counts, cumulated, 7)
        except Exception:
            return False
        replaced_expected = torch.where(expected == 0, 1.0, expected)
        rights = ((found, expected), (replaced, replaced_expected), (found_counts, counts[[0, 0, 1, 2, 2, 2, 2]]))
        if not all(torch.equal(one.to(other.dtype), other) for one, other in rights):
            return False
    return True


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[a, b, c] with [2, 5, 6] to [a, a, b, b, b, c]; `replace_from` becomes `replace_to`. vLLM's own signature."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)
