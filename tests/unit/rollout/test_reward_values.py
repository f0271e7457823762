"""Whatever an environment returns: a finite number, a masked sample, or a refusal that says what it was."""

import math

import numpy as np
import pytest
import torch

from megatron_grpo.errors import RewardFailed
from megatron_grpo.rollout.reward_values import Reward, as_number, read_rewards


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.array(1), np.array([1.0]), np.array([[1]]), torch.ones(1, 1)]
)
def test_one_number_in_any_wrapping_is_accepted(value):
    assert as_number(value, "env") == 1.0


@pytest.mark.parametrize("value, shown", [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (None, "None")])
def test_what_is_not_finite_is_masked_and_shown(value, shown):
    assert read_rewards([1.0, value], 2, "env") == (Reward(value=1.0), Reward(value=0.0, unusable=shown))


def test_an_integer_beyond_every_float_is_infinite():
    assert as_number(-(10**400), "env") == -math.inf


@pytest.mark.parametrize("value", ["0.5", [0.1, 0.2], np.zeros(0), np.zeros((2, 1)), {"reward": 1}, object(), 1j])
def test_anything_else_is_refused_naming_the_environment(value):
    with pytest.raises(RewardFailed, match="env 'x'"):
        as_number(value, "env 'x'")


@pytest.mark.parametrize("answers", [[1.0], [1.0] * 3, [], np.zeros((1, 2))])
def test_a_wrong_number_of_rewards_is_refused(answers):
    with pytest.raises(RewardFailed, match=f"{len(answers)} rewards for 2"):
        read_rewards(answers, 2, "env")


def test_a_column_of_rewards_is_read_row_by_row():
    assert read_rewards(np.array([[0.25], [0.5]]), 2, "env") == (Reward(value=0.25), Reward(value=0.5))


def test_a_table_of_rewards_is_refused_naming_the_shape():
    with pytest.raises(RewardFailed, match=r"\[2\]"):
        read_rewards(np.zeros((2, 2)), 2, "env")
