"""Reuse of keys and values between requests with the same beginning: chat turns, system prompts, several choices.

A few slots past those of running requests keep what finished requests wrote. A new request copies the longest beginning it
shares with one of them, or with a request that still runs. Copies, not pages: every request has one contiguous slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MIN_SHARED_TOKENS = 16
"""Shorter beginnings are cheaper to compute than to keep."""


class PrefixCache:
    """Which tokens each keeping slot holds, least recently used first. Copying the tensors is the engine's part."""

    def __init__(self, *, first_slot: int, num_slots: int) -> None:
        self._free = list(range(first_slot, first_slot + num_slots))
        self._kept: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._owners: dict[int, str | None] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def find(
        self, prompt: Sequence[int], running: Iterable[tuple[int, Sequence[int]]], owner: str | None = None
    ) -> tuple[int, int]:
        """(slot, number of tokens) of the longest shared beginning, (-1, 0) when none is long enough.

        `running`: (slot, tokens its cache holds). Of kept ones only the owner's own are looked at. The prompt's last token is
        never shared: its logits are needed.
        """
        best_slot, best_shared = -1, MIN_SHARED_TOKENS - 1
        own = [(slot, tokens) for slot, tokens in self._kept.items() if self._owners[slot] == owner]
        for slot, token_ids in [*own, *running]:
            shared = num_shared(prompt[:-1], token_ids)
            if shared > best_shared:
                best_slot, best_shared = slot, shared
        self.num_queried_tokens += len(prompt)
        if best_slot < 0:
            return -1, 0
        if best_slot in self._kept:
            self._kept.move_to_end(best_slot)
        self.num_hit_tokens += best_shared
        return best_slot, best_shared

    def reserve(self, token_ids: Sequence[int], owner: str | None = None) -> int | None:
        """The slot to copy a finished request's cache into; None when it is too short or already there.

        The slot holds nothing from now on: `keep` says that the copy is made, `give_back` that it failed.
        """
        tokens = tuple(token_ids)
        if len(tokens) < MIN_SHARED_TOKENS or not (self._free or self._kept):
            return None
        for slot, kept in self._kept.items():
            if self._owners[slot] != owner:
                continue
            shared = num_shared(tokens, kept)
            if shared == len(tokens):
                self._kept.move_to_end(slot)
                return None
            if shared == len(kept):  # the same conversation, longer now
                break
        else:
            slot = self._free.pop() if self._free else next(iter(self._kept))
        self._kept.pop(slot, None)
        return slot

    def keep(self, slot: int, token_ids: Sequence[int], owner: str | None = None) -> None:
        """`owner`: the client it is kept for; None is everybody."""
        self._kept[slot] = tuple(token_ids)
        self._owners[slot] = owner

    def forget(self) -> list[int]:
        """Keep nothing any more; returns the slots that did."""
        slots = list(self._kept)
        self._kept.clear()
        self._free += slots
        return slots

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


def num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
