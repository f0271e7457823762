"""From recipe to reward transforms and admission."""

import numpy as np

from megatron_grpo.replay.admission import AdmitAll, DynamicSampling
from megatron_grpo.rollout.transforms import admission, reward_transforms
from tests.unit.config.recipes import recipe

SCALING = {"grpo.reward_scaling.enabled": True, "grpo.reward_scaling.target_max": 10.0}
SHAPING = {
    "grpo.reward_shaping.enabled": True,
    "grpo.reward_shaping.overlong_buffer_length": 10,
    "grpo.reward_shaping.overlong_buffer_penalty": 3.0,
    "grpo.reward_shaping.max_response_length": 20,
}


def applied(*changes):
    rewards = np.array([0.0, 1.0, 1.0])
    for transform in reward_transforms(recipe(*changes).grpo):
        rewards = transform.apply(rewards, np.array([5, 15, 40]))
    return rewards.tolist()


def test_nothing_asked_for_changes_nothing():
    assert reward_transforms(recipe().grpo) == () and isinstance(admission(recipe().grpo), AdmitAll)


def test_the_penalty_comes_on_top_of_the_scaled_reward():
    assert applied(SCALING) == [0.0, 10.0, 10.0]
    assert applied(SHAPING) == [0.0, -0.5, -2.0]
    assert applied(SCALING, SHAPING) == [0.0, 8.5, 7.0]


def test_dynamic_sampling_takes_its_limit_from_the_recipe():
    assert isinstance(admission(recipe({"grpo.use_dynamic_sampling": True}).grpo), DynamicSampling)
