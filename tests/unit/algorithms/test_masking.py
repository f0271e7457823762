"""Which samples do not train, and why."""

import numpy as np
import pytest

from megatron_grpo.algorithms.masking import BAD_REWARD, NO_TOKENS, OVERLONG, mask_reason, usable_reward


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.int64(2), np.bool_(True)])
def test_a_finite_number_is_a_reward(value):
    assert usable_reward(value) == float(value)


@pytest.mark.parametrize(
    "value",
    [None, float("nan"), float("inf"), -np.inf, np.float32("nan"), "1.0", [1.0], np.array([1.0, 2.0]), 10**400, 1j],
)
def test_whatever_else_an_environment_answers_is_not(value):
    assert usable_reward(value) is None


@pytest.mark.parametrize(
    ("reward", "finish_reason", "num_generated", "overlong_filtering", "reason"),
    [
        (1.0, "stop", 3, True, None),
        (1.0, "length", 3, False, None),
        (1.0, "length", 3, True, OVERLONG),
        (None, "stop", 3, False, BAD_REWARD),
        (None, "length", 3, True, BAD_REWARD),
        (0.0, "stop", 0, False, NO_TOKENS),
    ],
)
def test_reason_of_a_sample(reward, finish_reason, num_generated, overlong_filtering, reason):
    found = mask_reason(
        reward=reward,
        finish_reason=finish_reason,
        num_generated=num_generated,
        overlong_filtering=overlong_filtering,
    )
    assert found == reason
