"""Reward scaling and the soft overlong penalty."""

import numpy as np
import pytest

from megatron_grpo.algorithms.shaping import OverlongPenalty, RewardScaling
from megatron_grpo.errors import ConfigError


def test_scaling_maps_the_range_and_clamps_outside():
    scaling = RewardScaling(source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)
    assert scaling.apply(np.array([-5.0, 0.0, 0.5, 2.0, 9.0])).tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]


def test_penalty_rises_over_the_buffer():
    penalty = OverlongPenalty(max_response_length=100, buffer_length=20, penalty=1.0)
    assert penalty.apply(np.ones(5), np.array([3, 80, 90, 100, 150])).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_ranges_that_make_no_sense_are_refused_naming_the_key():
    with pytest.raises(ConfigError, match="grpo.reward_scaling.source_min"):
        RewardScaling(source_min=1.0, source_max=1.0, target_min=0.0, target_max=1.0)
    with pytest.raises(ConfigError, match="overlong_buffer_length"):
        OverlongPenalty(max_response_length=10, buffer_length=11, penalty=1.0)
