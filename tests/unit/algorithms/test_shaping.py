"""Reward scaling and the soft overlong penalty."""

import numpy as np
import pytest

from megatron_grpo.algorithms.shaping import OverlongPenalty, RewardScaling


def test_scaling_maps_the_range_and_clamps_outside():
    scaling = RewardScaling(source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)
    assert scaling.apply(np.array([-5.0, 0.0, 0.5, 2.0, 9.0]), np.zeros(5)).tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]


def test_penalty_rises_over_the_buffer():
    penalty = OverlongPenalty(max_response_length=100, buffer_length=20, penalty=1.0)
    assert penalty.apply(np.ones(5), np.array([3, 80, 90, 100, 150])).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("buffer_length", [0, 11])
def test_ranges_that_make_no_sense_are_our_mistake_here(buffer_length):
    with pytest.raises(AssertionError):
        RewardScaling(source_min=1.0, source_max=1.0, target_min=0.0, target_max=1.0)
    with pytest.raises(AssertionError):
        OverlongPenalty(max_response_length=10, buffer_length=buffer_length, penalty=1.0)
