from types import SimpleNamespace

import pytest

from livedraft.config import EngineConfig
from livedraft.engine.slots import within_memory, within_model
from livedraft.events import Events
from livedraft.records import UserError

KIB_A_POSITION = SimpleNamespace(kv_bytes_per_position=lambda num_draft_layers: 1024)


def fitting(gib, **options):
    events, seen = Events(), []
    events.subscribe(seen.append)
    config = EngineConfig(kv_cache_gb=gib, max_model_len=1024, **options)  # one MiB a slot
    return within_memory(config, KIB_A_POSITION, 2, events), seen


@pytest.mark.parametrize(
    ("mib", "num_slots", "num_prefix_slots"), [(100, 16, 4), (20, 16, 4), (19, 15, 4), (8, 6, 2), (4, 3, 1), (1, 1, 0)]
)
def test_the_budget_decides_how_many_slots(mib, num_slots, num_prefix_slots):
    config, seen = fitting(mib / 1024)
    assert (config.max_num_seqs, config.num_prefix_slots) == (num_slots, num_prefix_slots)
    assert config.max_num_seqs + config.num_prefix_slots <= mib
    assert bool(seen) == (mib < 20)  # fewer than asked is said


def test_no_room_for_one_is_an_error_with_the_numbers():
    with pytest.raises(UserError, match=r"needs 0\.00 GiB .* kv_cache_gb"):
        fitting(0.5 / 1024)


def test_the_models_context_bounds_the_default_and_refuses_a_longer_wish():
    assert within_model(EngineConfig(), 512).max_model_len == 512
    assert within_model(EngineConfig(max_model_len=100), 512).max_model_len == 100
    with pytest.raises(ValueError, match="context ends at 512"):
        within_model(EngineConfig(max_model_len=600), 512)
