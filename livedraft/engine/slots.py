"""How many requests fit: the model's context and a memory budget decide the number and the length of KV slots."""

from __future__ import annotations

from dataclasses import replace

from livedraft.config import EngineConfig
from livedraft.device import available_memory_bytes
from livedraft.events import Events
from livedraft.models.open import OpenModel
from livedraft.records import UserError


def within_model(config: EngineConfig, max_positions: int) -> EngineConfig:
    if config.max_model_len <= max_positions:
        return config
    if config.max_model_len != EngineConfig().max_model_len:
        raise ValueError(f"max_model_len is {config.max_model_len}, but the model's context ends at {max_positions}.")
    return replace(config, max_model_len=max_positions)


def within_memory(config: EngineConfig, opened: OpenModel, num_draft_layers: int, events: Events) -> EngineConfig:
    """As many slots as the budget holds, at most max_num_seqs. `num_draft_layers`: of all drafts that may be resident. Raises
    UserError when it does not hold one."""
    slot_bytes = opened.kv_bytes_per_position(num_draft_layers) * config.max_model_len
    budget = (
        available_memory_bytes(opened.path.device) / 2 if config.kv_cache_gb is None else config.kv_cache_gb * 2**30
    )
    num_slots = int(budget // slot_bytes)
    if num_slots < 1:
        raise UserError(
            f"One request of {config.max_model_len} tokens needs {slot_bytes / 2**30:.2f} GiB of KV memory and the budget is "
            f"{budget / 2**30:.2f}; lower max_model_len or raise kv_cache_gb."
        )
    if num_slots >= config.max_num_seqs + config.num_prefix_slots:
        return config
    num_prefix_slots = min(config.num_prefix_slots, num_slots // 4)
    fitting = replace(
        config, max_num_seqs=min(config.max_num_seqs, num_slots - num_prefix_slots), num_prefix_slots=num_prefix_slots
    )
    events.emit(
        "slots_reduced",
        max_num_seqs=fitting.max_num_seqs,
        asked=config.max_num_seqs,
        gib_a_slot=round(slot_bytes / 2**30, 3),
        budget_gib=round(budget / 2**30, 2),
    )
    return fitting
