import logging

import pytest
import torch

from livedraft.models.graphs import EagerReplay, GraphLadder, HostCopy, StaticInput, steps_up_to

SHAPES = [(b, n) for b in (1, 2, 4) for n in (1, 3)]


class Recording(EagerReplay):
    def __init__(self, fails_on=(), error=None):
        self.recorded, self._fails_on = 0, fails_on
        self._error = error or RuntimeError("operation not permitted when stream is capturing")

    def capture(self, work):
        self.recorded += 1
        if self.recorded in self._fails_on:
            raise self._error
        return work


def test_the_smallest_shape_that_covers_runs():
    ran = []
    ladder = GraphLadder(SHAPES, lambda *shape: ran.append(shape), EagerReplay())
    for wanted, expected in {(1, 1): (1, 1), (2, 2): (2, 3), (3, 1): (4, 1), (4, 3): (4, 3)}.items():
        shape, replay = ladder.covering(wanted)
        replay()
        assert shape == expected == ran[-1]
    assert ladder.covering((5, 1)) is None
    assert ladder.covering((1, 4)) is None


def test_out_of_time_larger_shapes_stand_in():
    """What nothing else covers is always recorded, and first."""
    ladder = GraphLadder([*SHAPES, (8, 1)], lambda *shape: None, EagerReplay(), seconds=-1.0)
    assert ladder.num_recorded == 2
    assert ladder.covering((1, 1))[0] == (8, 1)
    assert ladder.covering((1, 2))[0] == (4, 3)


def test_what_cannot_be_recorded_runs_eagerly_and_says_so_once(caplog):
    ran = []
    with caplog.at_level(logging.WARNING, "livedraft"):
        ladder = GraphLadder(SHAPES, lambda *shape: ran.append(shape), Recording(fails_on=(1, 2, 4)))
    ladder.covering((4, 3))[1]()
    assert ran == [(4, 3)]
    assert ladder.failure == "operation not permitted when stream is capturing"
    assert len(caplog.records) == 1


def test_too_little_memory_is_not_hidden():
    with pytest.raises(torch.OutOfMemoryError):
        GraphLadder(SHAPES, lambda *shape: None, Recording(fails_on=(2,), error=torch.OutOfMemoryError("CUDA")))


def test_steps():
    assert steps_up_to(1) == [1]
    assert steps_up_to(20) == [1, 2, 4, 8, 16, 20]
    assert steps_up_to(2048, 128, 4) == [128, 512, 2048]
    assert steps_up_to(100, 128) == [100]


def test_inputs_keep_their_address_and_copies_their_values():
    numbers = StaticInput(4, torch.int64, torch.device("cpu"))
    address = numbers.on_device.data_ptr()
    numbers.fill([1, 2, 3])
    read = HostCopy(numbers.on_device[:3])
    numbers.fill([9])
    assert numbers.on_device.tolist() == [9, 2, 3, 0]
    assert numbers.on_device.data_ptr() == address
    assert read.values == [1, 2, 3]
