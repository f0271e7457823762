"""Every second is charged to exactly one cause."""

import pytest

from megatron_grpo.metrics import Stopwatch


class FakeTime:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_clock_charges_each_second_to_the_innermost_cause():
    time = FakeTime()
    clock = Stopwatch(time)
    time.now += 1
    with clock.measure("train"):
        time.now += 2
        with clock.measure("refit"):
            time.now += 4
        time.now += 8
    with clock.measure("refit"):
        time.now += 16
    assert clock.lap() == {"other": 1, "train": 10, "refit": 20}
    time.now += 32
    assert clock.lap() == {"other": 32}


def test_a_clock_charges_a_block_that_raises():
    time = FakeTime()
    clock = Stopwatch(time)
    with pytest.raises(KeyError), clock.measure("train"):
        time.now += 3
        raise KeyError
    time.now += 1
    assert clock.lap() == {"train": 3, "other": 1}


def test_overlapping_blocks_of_one_clock_are_a_bug():
    clock = Stopwatch()
    outer, inner = clock.measure("a"), clock.measure("b")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(AssertionError, match="leaving 'a'"):
        outer.__exit__(None, None, None)
