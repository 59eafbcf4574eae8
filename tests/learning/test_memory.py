"""What a batch is made of, and what counts as evidence: passes, spacing, clients."""

import dataclasses
from collections import Counter

import pytest

from livedraft.config import LearningConfig
from livedraft.learning.batches import example_from_trace
from livedraft.learning.memory import MIN_FROM_ONE_CLIENT, Memory
from tests.learning.toy import served_traces


@pytest.fixture(scope="module")
def examples():
    return [example_from_trace(trace, n + 1) for n, trace in enumerate(served_traces(60))]


def of_client(examples, client):
    return [dataclasses.replace(example, client_key=client) for example in examples]


def memory(**settings):
    return Memory(LearningConfig(**{"traces_per_chunk": 4, "replay_spacing": 0.0, **settings}), 64)


def train(made):
    """One batch; None when no chunk is there."""
    found = made.next_batch()
    if found is None:
        return None
    new, old = found
    made.count_use([*new, *old])
    made.mark_trained(new)
    return [*new, *old]


def test_a_flood_of_one_client_never_fills_a_batch_while_others_wait(examples):
    made = memory()
    flood, others = (
        of_client(examples[:40], "flood"),
        [dataclasses.replace(e, client_key=f"c{n}") for n, e in enumerate(examples[40:])],
    )
    for example in [*flood[:30], *others, *flood[30:]]:
        made.add(example, is_held_out=False)
    shares = []
    for number in range(10):
        batch = train(made)
        share = sum(example.client_key == "flood" for example in batch) / len(batch)
        shares.append(share)
        if number < 5:  # later only the flood is left among the new ones
            assert share <= 0.5 + 1e-9, shares
    assert shares[0] == 0.5
    assert max(shares[1:]) <= 0.5


def test_a_single_user_still_learns(examples):
    made = memory()
    for example in of_client(examples[:12], "me"):
        made.add(example, is_held_out=False)
    sizes = [len(train(made)) for _ in range(3)]
    assert sizes[0] == 4
    assert made.num_trained == 12
    assert made.next_batch() is None


def test_evidence_of_one_client_is_no_more_than_that_of_all_others(examples):
    made = memory()
    for example in of_client(examples[:40], "flood"):
        made.add(example, is_held_out=False)
    for example in of_client(examples[40:58], ""):
        made.add(example, is_held_out=False)
    found = Counter(example.client_key for example in made.evidence(0))
    assert found == {"flood": 18, "": 18}
    alone = memory()
    for example in of_client(examples[:40], "me"):
        alone.add(example, is_held_out=False)
    assert len(alone.evidence(0)) == 2 * MIN_FROM_ONE_CLIENT  # as many as the gate needs positions
    assert max(example.trace_id for example in alone.evidence(0)) == 40  # the newest


def test_passes_keep_their_distance_and_run_out(examples):
    made = memory(replay_spacing=0.5, max_passes=3, replay_per_new=1)
    for example in examples[:8]:
        made.add(example, is_held_out=False)
    train(made)
    assert made.idle_batch(is_long_idle=False) == []  # four trained, and two must lie between
    train(made)
    assert {e.trace_id for e in made.idle_batch(is_long_idle=False)} <= {e.trace_id for e in examples[:4]}
    while batch := made.idle_batch(is_long_idle=True):
        made.count_use(batch)
    assert set(made.copies.values()) == {3}


def test_newer_requests_come_again_more_often(examples):
    made = memory(max_passes=1000)
    for example in examples:
        made.add(example, is_held_out=False)
    while train(made) is not None:
        pass
    counts = Counter(example.trace_id for _ in range(300) for example in made.replayed(6))
    old = sum(counts[e.trace_id] for e in examples[:20])
    new = sum(counts[e.trace_id] for e in examples[40:])
    assert 1.5 * old < new
    assert old > 0


def test_copies_of_a_prompt_that_wait_count_too(examples):
    made = memory(max_passes=2)
    for number in range(5):
        made.add(dataclasses.replace(examples[0], trace_id=100 + number), is_held_out=False)
    assert len(made.fresh) == 2
    nothing = dataclasses.replace(examples[1], loss_mask_T=examples[1].loss_mask_T & False)
    made.add(nothing, is_held_out=False)
    assert len(made.fresh) == 2  # an example without a position that teaches is no work


def test_a_client_that_is_nearly_alone_gives_enough_evidence(examples):
    """Its flood must not decide for others; where there are none, short answers have to be enough."""
    from livedraft.learning import gate

    short = [
        dataclasses.replace(
            examples[n % len(examples)], trace_id=n, client_key="app", loss_mask_T=examples[0].loss_mask_T[:10]
        )
        for n in range(1, 301)
    ]
    made = memory()
    made.held_out = {one.trace_id: one for one in short}
    evidence = made.evidence(10_000)
    assert sum(one.num_positions for one in evidence) >= gate.MIN_POSITIONS
    made.held_out |= {
        1000 + n: dataclasses.replace(one, trace_id=1000 + n, client_key="") for n, one in enumerate(short[:60])
    }
    assert sum(one.client_key == "app" for one in made.evidence(10_000)) == 60
