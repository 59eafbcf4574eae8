"""The cache's memory: zeros that cost nothing until they are written."""

import pytest
import torch

from livedraft.models.kv_cache import KVCache


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_used_only_as_positions_are_written(dtype):
    before = resident_bytes()
    cache = KVCache(
        num_layers=4, num_slots=20, num_kv_heads=4, max_length=4096, head_width=64, dtype=dtype, device=torch.device("cpu")
    )  # fmt: skip
    assert cache._storage.numel() * dtype.itemsize >= 300 << 20
    assert resident_bytes() - before < 50 << 20
    assert cache.keys[3].data_ptr() % 64 == 0
    assert cache.values[3].shape == (20, 4, 4096, 64)
    cache.keys[0][2, :, :10] = 1.0
    cache.copy(2, 5, 8)
    assert cache.keys[0][5].sum() == 4 * 8 * 64
    cache.clear(2)
    assert not cache.keys[0][2].any() and not cache.values[3][19, :, -5:].any()
    assert resident_bytes() - before < 200 << 20
