"""What the trainer remembers: new requests it has not trained on, old ones to replay, held-out ones to test with.

Three rules that every batch keeps: no prompt trains more than `max_passes` times, no prompt is twice among what is replayed,
and no client that names itself fills more than half of it while there are others.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from livedraft.config import LearningConfig
from livedraft.learning import gate
from livedraft.learning.batches import Example
from livedraft.learning.store import Streams
from livedraft.learning.vocabulary import VocabularyUse

MAX_KEPT_EXAMPLES = 2000
"""Replay window, in traces."""
MAX_HELD_OUT = 200
MAX_FRESH = 1000
"""New requests that may wait; when training cannot keep up the oldest are passed over."""
MAX_EVIDENCE = 400
MIN_FROM_ONE_CLIENT = 16
"""Requests of one client that may always be evidence; beyond them no more than all others have together."""
DRIFT_TRACES = 64
"""New requests after a drift that train with one replayed request each instead of replay_per_new."""
_OLDEST_WEIGHT = 0.25
"""How likely the oldest example of the window is replayed, beside the newest."""


def _without_crowd(examples: list[Example]) -> list[Example]:
    """The newest of a client that named itself, as many as all others have together: its flood must not decide for
    everybody."""
    by_client = Counter(example.client_key for example in examples)
    newest_first = sorted(examples, key=lambda example: -example.trace_id)
    least = MIN_FROM_ONE_CLIENT
    while True:
        kept: list[Example] = []
        taken: Counter[str] = Counter()
        for example in newest_first:
            client = example.client_key
            limit = max(least, len(examples) - by_client[client])
            if not client or taken[client] < limit:
                kept.append(example)
                taken[client] += 1
        # Where hardly anybody else asks, short answers of one client must be enough evidence all the same.
        if len(kept) == len(examples) or sum(example.num_positions for example in kept) >= gate.MIN_POSITIONS:
            return kept[::-1]
        least *= 2


class Memory:
    def __init__(self, config: LearningConfig, vocabulary_size: int) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self.vocabulary = VocabularyUse(vocabulary_size)
        self.streams = Streams()
        """Whose requests train and test; what is remembered of others waits for their return."""
        self.fresh: list[Example] = []
        """Scored, not yet trained on."""
        self.examples: OrderedDict[int, Example] = OrderedDict()
        """Trained on at least once, oldest first."""
        self.held_out: OrderedDict[int, Example] = OrderedDict()
        self._waiting: Counter[int] = Counter()
        """By prompt: copies among `fresh`."""
        self.num_passed_over = 0
        """New requests that were never trained on because too many waited."""
        self.copies: Counter[int] = Counter()
        """By prompt: how often it was in a batch."""
        self._used_at: dict[int, int] = {}
        """By prompt: how many requests had been trained on when it was last in a batch."""
        self.trained_ids: set[int] = set()
        self.newest_trained_id = 0
        self.num_trained = 0
        self._num_after_drift = DRIFT_TRACES
        self.drift_id = 0
        """The first trace of the traffic that is now; held-out requests before it are no evidence any more."""
        self.num_trained_at_drift = 0

    def has_trained_id(self, trace_id: int) -> bool:
        """Also of traces too old to be remembered one by one."""
        return trace_id in self.trained_ids or (bool(self.trained_ids) and trace_id < min(self.trained_ids))

    def has_trained_on(self, example: Example) -> bool:
        return self.copies[example.prompt_key] > 0

    def serve(self, streams: Streams) -> None:
        """From now on it is these streams' memory. New requests of others are left to the drafts that serve them."""
        self.streams = streams
        self.fresh = [example for example in self.fresh if streams.include(example.stream)]
        self._waiting = Counter(example.prompt_key for example in self.fresh)

    def start_as_copy_of(self, other: Memory) -> None:
        """Of weights that have learnt what `other` says: no request is new to them that was in a step, no prompt gets more
        passes for it, and the words they can say are still wanted."""
        self.vocabulary.restore(other.vocabulary.used())
        self.copies = Counter(other.copies)
        self.trained_ids = set(other.trained_ids)
        self.newest_trained_id = other.newest_trained_id

    def add(self, example: Example, *, is_held_out: bool) -> None:
        """A request that has just been scored."""
        if not self.streams.include(example.stream):
            return
        if is_held_out:
            self.held_out[example.trace_id] = example
            if len(self.held_out) > MAX_HELD_OUT:
                self.held_out.popitem(last=False)
            return
        key = example.prompt_key
        if self.copies[key] + self._waiting[key] < self._config.max_passes and example.teaches:
            self.fresh.append(example)
            self._waiting[key] += 1
        if len(self.fresh) > MAX_FRESH:
            self._waiting[self.fresh.pop(0).prompt_key] -= 1
            self.num_passed_over += 1

    def add_trained(self, example: Example) -> None:
        """One that trained before a restart."""
        self.examples[example.trace_id] = example
        self._drop_oldest()

    @property
    def has_new_chunk(self) -> bool:
        return len(self.fresh) >= self._config.traces_per_chunk

    def next_batch(self) -> tuple[list[Example], list[Example]] | None:
        """(new examples, old ones to replay with them) for one optimiser step; None until a whole chunk is new."""
        if not self.has_new_chunk:
            return None
        new = self._next_chunk(self._config.traces_per_chunk)
        for example in new:
            self.vocabulary.add(example)
        per_new = min(1, self._config.replay_per_new) if self.is_drifting else self._config.replay_per_new
        self._num_after_drift += len(new)
        return new, self.replayed(per_new * len(new), beside=new)

    def _next_chunk(self, size: int) -> list[Example]:
        """The oldest new ones, of a client at most half where others wait too."""
        by_client: Counter[str] = Counter()
        chosen: list[int] = []
        passed_over: list[int] = []
        for index, example in enumerate(self.fresh):
            if len(chosen) == size:
                break
            is_crowd = example.client_key and by_client[example.client_key] >= (size + 1) // 2
            (passed_over if is_crowd else chosen).append(index)
            by_client[example.client_key] += 1
        chosen = sorted(chosen + passed_over[: size - len(chosen)])
        chunk = [self.fresh[index] for index in chosen]
        self._waiting.subtract(example.prompt_key for example in chunk)
        self.fresh = [example for index, example in enumerate(self.fresh) if index not in set(chosen)]
        return chunk

    def idle_batch(self, *, is_long_idle: bool) -> list[Example]:
        """Old examples alone, for idle compute; empty when all have had their passes. After a long idle time they come without
        the usual distance between two passes: it would be kept for requests that do not come."""
        if self._config.replay_per_new == 0:
            return []
        return self.replayed((1 + self._config.replay_per_new) * self._config.traces_per_chunk, is_hurried=is_long_idle)

    def replayed(self, count: int, *, beside: Sequence[Example] = (), is_hurried: bool = False) -> list[Example]:
        """Up to `count` old examples, newer ones more likely, for a batch that holds those `beside` too."""
        spacing = 0.0 if is_hurried else self._config.replay_spacing * self.num_trained
        usable = [one for one in self._served(self.examples.values()) if self._may_come_again(one, spacing)]
        if count < len(usable):
            # Weighted order without replacement (Efraimidis and Spirakis): the largest keys u^(1/w) first.
            weights = [_OLDEST_WEIGHT + (1 - _OLDEST_WEIGHT) * (rank + 1) / len(usable) for rank in range(len(usable))]
            keys = [self._random.random() ** (1 / weight) for weight in weights]
            usable = [usable[index] for index in sorted(range(len(usable)), key=keys.__getitem__, reverse=True)]
        batch: list[Example] = []
        by_client = Counter(example.client_key for example in beside)
        most = max(1, (count + len(beside)) // 2)
        prompts = {example.prompt_key for example in beside}
        for example in usable:
            is_crowd = example.client_key and by_client[example.client_key] >= most
            if len(batch) < count and not is_crowd and example.prompt_key not in prompts:
                batch.append(example)
                by_client[example.client_key] += 1
                prompts.add(example.prompt_key)
        return batch

    def _may_come_again(self, example: Example, spacing: float) -> bool:
        """Passes are few, and the same request twice in a row teaches little: `spacing` others were trained on in between."""
        key = example.prompt_key
        if self.copies[key] + self._waiting[key] >= self._config.max_passes:
            return False
        return self.num_trained - self._used_at.get(key, 0) >= spacing

    def count_use(self, batch: Sequence[Example]) -> None:
        """The batch is in a step."""
        for example in batch:
            self.copies[example.prompt_key] += 1
            self._used_at[example.prompt_key] = self.num_trained

    def mark_trained(self, new: Sequence[Example]) -> None:
        """`new` was in a step for the first time."""
        for example in new:
            self.examples[example.trace_id] = example
            self.trained_ids.add(example.trace_id)
            self.newest_trained_id = max(self.newest_trained_id, example.trace_id)
        self._drop_oldest()
        self.num_trained += len(new)
        for example in new:
            self._used_at[example.prompt_key] = self.num_trained

    def _drop_oldest(self) -> None:
        while len(self.examples) > MAX_KEPT_EXAMPLES:
            self.examples.popitem(last=False)

    def prefer_new(self, since_id: int) -> None:
        """The traffic has changed, from that trace on: for a while fewer old requests are mixed in, and what a draft is worth
        on the old traffic is no longer asked."""
        self._num_after_drift = 0
        self.drift_id, self.num_trained_at_drift = since_id, self.num_trained
        self.fresh.sort(key=lambda example: example.trace_id < since_id)  # what is new goes before what still waits

    @property
    def is_drifting(self) -> bool:
        return self._num_after_drift < DRIFT_TRACES

    def evidence(self, last_trained_id: int) -> list[Example]:
        """What weights trained up to that trace have not seen, of the traffic that is now: held-out requests, and all that came
        later."""
        held_out = [one for one in self._served(self.held_out.values()) if one.trace_id >= self.drift_id]
        kept = self._served((*self.examples.values(), *self.fresh))
        newer = [one for one in kept if one.trace_id > last_trained_id and one.trace_id >= self.drift_id]
        return _without_crowd([*held_out, *newer])[-MAX_EVIDENCE:]

    def since_drift(self) -> list[Example]:
        """All that is remembered of the traffic that is now, trained on or not."""
        kept = self._served((*self.held_out.values(), *self.examples.values(), *self.fresh))
        return _without_crowd([example for example in kept if example.trace_id >= self.drift_id])[-MAX_EVIDENCE:]

    def _served(self, examples: Iterable[Example]) -> list[Example]:
        return [example for example in examples if self.streams.include(example.stream)]

    def forget_all_but(self, trace_ids: Collection[int]) -> None:
        for kept in (self.examples, self.held_out):
            for trace_id in [trace_id for trace_id in kept if trace_id not in trace_ids]:
                del kept[trace_id]
        self.fresh = [example for example in self.fresh if example.trace_id in trace_ids]
        self._waiting = Counter(example.prompt_key for example in self.fresh)
        known = {example.prompt_key for example in (*self.examples.values(), *self.fresh)}
        for counts in (self.copies, self._used_at):  # not even that a prompt was seen is kept
            for key in [key for key in counts if key not in known]:
                del counts[key]

    # --- surviving a kill ---------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """For a checkpoint, as JSON; the examples themselves are in the store."""
        return {
            "copies": list(self.copies.items()),
            "trained_ids": sorted(self.trained_ids)[-4 * MAX_KEPT_EXAMPLES :],
            "newest_trained_id": self.newest_trained_id,
            "num_trained": self.num_trained,
            "drift_id": self.drift_id,
            "num_trained_at_drift": self.num_trained_at_drift,
            "num_after_drift": self._num_after_drift,
            "vocabulary": self.vocabulary.used(),
        }

    def restore(self, counters: dict[str, Any]) -> None:
        """Raises KeyError for what `counters` did not make."""
        self.copies = Counter(dict(counters["copies"]))
        self.trained_ids = set(counters["trained_ids"])
        self.newest_trained_id, self.num_trained = counters["newest_trained_id"], counters["num_trained"]
        # Not in checkpoints of livedraft before 2026-12.
        self.drift_id, self.num_trained_at_drift = counters.get("drift_id", 0), counters.get("num_trained_at_drift", 0)
        self._num_after_drift = counters.get("num_after_drift", DRIFT_TRACES)
        self.vocabulary.restore(counters["vocabulary"])
