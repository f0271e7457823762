"""Which finished groups are refused, and how many."""

import dataclasses

import pytest

from megatron_grpo.errors import SamplingExhausted
from megatron_grpo.replay.admission import AdmitAll, DynamicSampling, lesson_missing
from tests.fakes import make_group, make_trajectory


def group(*rewards, target=0):
    """A masked sample is written as None."""
    made = tuple(
        dataclasses.replace(make_trajectory([0]), reward=reward or 0.0, masked_because="x" if reward is None else None)
        for reward in rewards
    )
    return make_group(0, 0, target, made)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.5, 0.5), "zero_variance"),
        ((0.5, None, 0.5), "zero_variance"),
        ((0.5,), "zero_variance"),
        ((None, None), "fully_masked"),
        ((0.1 + 0.2, 0.3), None),
        ((0.0, 1.0, None), None),
    ],
)
def test_a_group_teaches_when_the_rewards_that_train_differ(rewards, reason):
    assert lesson_missing(group(*rewards)) == reason
    assert DynamicSampling(num_prompts_per_step=4, max_gen_batches=9).reason_to_refuse(group(*rewards)) == reason
    assert AdmitAll().reason_to_refuse(group(*rewards)) is None


def test_the_limit_counts_whole_batches_per_step():
    sampling = DynamicSampling(num_prompts_per_step=2, max_gen_batches=3)
    for _ in range(4):  # of six groups two may still be good
        assert sampling.reason_to_refuse(group(1.0, 1.0)) == "zero_variance"
        assert sampling.reason_to_refuse(group(1.0, 1.0, target=1)) == "zero_variance"
    with pytest.raises(SamplingExhausted, match=r"step 0 .*grpo\.dynamic_sampling_max_gen_batches = 3 allows 3 x 2"):
        sampling.reason_to_refuse(group(1.0, 1.0))


def test_a_step_that_is_done_is_forgotten():
    sampling = DynamicSampling(num_prompts_per_step=2, max_gen_batches=2)
    for step in range(50):
        sampling.reason_to_refuse(group(1.0, 1.0, target=step))
        sampling.reason_to_refuse(group(1.0, 1.0, target=step))
        sampling.step_done(step)
    assert not sampling._num_refused


def test_a_limit_of_one_batch_refuses_no_group_quietly():
    with pytest.raises(SamplingExhausted):
        DynamicSampling(num_prompts_per_step=2, max_gen_batches=1).reason_to_refuse(group(1.0, 1.0))
