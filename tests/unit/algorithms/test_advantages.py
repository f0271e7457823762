"""Group-relative advantages against a loop over samples."""

import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.advantages import group_advantages


def slow_advantages(rewards, ids, mask, leave_one_out, normalize):
    result = []
    for i, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
        members = [j for j in range(len(rewards)) if ids[j] == group and mask[j]]
        chosen = [rewards[j] for j in members if not (leave_one_out and j == i)]
        if not mask[i] or len(members) < 2 or len({rewards[j] for j in members}) == 1:
            result.append(0.0)
            continue
        advantage = reward - statistics.fmean(chosen)
        if normalize and len(chosen) >= 2:
            deviation = statistics.stdev(chosen)
            if deviation > 1e-6 * max(1, *(abs(rewards[j]) for j in members)):
                advantage /= deviation
        result.append(advantage)
    return result


rewards = st.one_of(st.sampled_from([0.0, 1.0, 0.1, 0.3, 0.1 + 0.2]), st.floats(-5, 5).map(lambda x: round(x, 3)))
samples = st.lists(st.tuples(rewards, st.integers(0, 3), st.booleans()), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None)
@given(samples=samples, leave_one_out=st.booleans(), normalize=st.booleans())
def test_equals_the_loop_over_samples(samples, leave_one_out, normalize):
    values, ids, mask = map(np.array, zip(*samples, strict=True))
    found = group_advantages(values, ids, mask, leave_one_out=leave_one_out, normalize=normalize)
    expected = slow_advantages(values.tolist(), ids.tolist(), mask.tolist(), leave_one_out, normalize)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9 + 0.1, -7e-12])
def test_equal_rewards_give_exactly_zero(leave_one_out, reward):
    found = group_advantages(np.full(7, reward), np.zeros(7), np.ones(7), leave_one_out=leave_one_out, normalize=True)
    assert (found == 0).all()


def test_equal_rewards_beside_a_masked_sample_give_exactly_zero():
    rewards, mask = np.array([0.1, 0.1, 0.1, -5.0]), np.array([1, 1, 1, 0])
    for leave_one_out in (True, False):
        found = group_advantages(rewards, np.zeros(4), mask, leave_one_out=leave_one_out, normalize=True)
        assert (found == 0).all()


def test_float_noise_is_not_divided_by_its_own_deviation():
    noisy = np.array([0.1 + 0.2, 0.3, 0.3, 1e6, 1e6 + 1e-9, 1e6])
    ids = np.array([0, 0, 0, 1, 1, 1])
    for leave_one_out in (True, False):
        found = group_advantages(noisy, ids, np.ones(6), leave_one_out=leave_one_out, normalize=True)
        assert np.abs(found).max() < 1e-8


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_equal_others_are_recognised_at_any_scale(scale, offset):
    """One outlier among equal rewards keeps its plain advantage, never one divided by rounding noise."""
    values = np.array([1.0] + [0.0] * 15) * scale + offset
    found = group_advantages(values, np.zeros(16), np.ones(16), leave_one_out=True, normalize=True)
    assert found[0] == pytest.approx(scale, rel=1e-6)


@given(samples=samples, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_row_order_and_the_ids_themselves_do_not_matter(samples, seed):
    values, ids, mask = map(np.array, zip(*samples, strict=True))
    order = np.random.default_rng(seed).permutation(len(values))
    first = group_advantages(values, ids, mask, leave_one_out=True, normalize=True)
    second = group_advantages(values[order], 1000 - 7 * ids[order], mask[order], leave_one_out=True, normalize=True)
    np.testing.assert_allclose(second, first[order], rtol=1e-9, atol=1e-12)


def test_a_masked_sample_may_hold_anything_and_shapes_nothing():
    args = {"leave_one_out": True, "normalize": True}
    junk = group_advantages(np.array([1.0, 0.0, 0.5, np.nan]), np.zeros(4), np.array([1, 1, 1, 0]), **args)
    clean = group_advantages(np.array([1.0, 0.0, 0.5]), np.zeros(3), np.ones(3), **args)
    assert junk.tolist() == [*clean.tolist(), 0.0]


def test_a_reward_that_trains_must_be_finite():
    with pytest.raises(ValueError, match="row 1 is inf"):
        group_advantages(np.array([1.0, np.inf]), np.zeros(2), np.ones(2), leave_one_out=True, normalize=False)
    with pytest.raises(ValueError, match="shapes"):
        group_advantages(np.ones((2, 1)), np.zeros(2), np.ones(2), leave_one_out=True, normalize=False)


def test_needs_no_torch():
    imports = "megatron_grpo.algorithms.advantages, megatron_grpo.algorithms.shaping, megatron_grpo.batching.shard"
    code = f"import sys, {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
