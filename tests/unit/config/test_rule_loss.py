"""Rules on the objective and its schedule: what breaks each, what it names, what passes."""

import pytest

from megatron_grpo.config import rule_loss
from tests.unit.config.recipes import assert_names, found, only

MEGATRON = "policy.megatron_cfg"
TRUNCATED = "loss_fn.truncated_importance_sampling"


@pytest.mark.parametrize("name", ["ratio", "ratio_min"])
def test_a_truncation_ratio_needs_a_type(name):
    ratio = {f"{TRUNCATED}_{name}": 2.0}
    assert_names(only(found(rule_loss.truncation_ratio_has_a_type, ratio)), f"{TRUNCATED}_{name}", f"{TRUNCATED}_type")
    assert found(rule_loss.truncation_ratio_has_a_type, ratio, {f"{TRUNCATED}_type": "tis"}) == []


def test_a_truncation_type_needs_a_ratio():
    kind = {f"{TRUNCATED}_type": "icepop"}
    assert_names(only(found(rule_loss.truncation_type_has_a_ratio, kind)), f"{TRUNCATED}_type", f"{TRUNCATED}_ratio")
    assert found(rule_loss.truncation_type_has_a_ratio, kind, {f"{TRUNCATED}_ratio": 2.0}) == []


def test_the_truncation_range_is_ordered():
    rule, high = rule_loss.truncation_range_is_ordered, {f"{TRUNCATED}_ratio": 2.0}
    assert_names(only(found(rule, high, {f"{TRUNCATED}_ratio_min": 2.5})), f"{TRUNCATED}_ratio_min = 2.5", "2.0")
    assert found(rule, high, {f"{TRUNCATED}_ratio_min": 2.0}) == []


@pytest.mark.parametrize("cap", [1.0, 0.5, -3.0])
def test_the_dual_clip_is_above_one(cap):
    assert_names(
        only(found(rule_loss.dual_clip_is_above_one, {"loss_fn.ratio_clip_c": cap})), "loss_fn.ratio_clip_c", cap
    )
    assert found(rule_loss.dual_clip_is_above_one, {"loss_fn.ratio_clip_c": 1.1}) == []


def test_the_overlong_buffer_fits_the_response():
    key = "grpo.reward_shaping"
    changes = {f"{key}.enabled": True, f"{key}.overlong_buffer_length": 9, f"{key}.max_response_length": 8}
    assert_names(
        only(found(rule_loss.overlong_buffer_fits_the_response, changes)),
        f"{key}.overlong_buffer_length",
        f"{key}.max_response_length",
    )
    assert found(rule_loss.overlong_buffer_fits_the_response, {**changes, f"{key}.enabled": False}) == []
    for length, num_problems in ((0, 1), (1, 0), (8, 0)):
        problems = found(rule_loss.overlong_buffer_fits_the_response, changes, {f"{key}.overlong_buffer_length": length})
        assert len(problems) == num_problems


def test_the_reward_source_range_is_ordered():
    key = "grpo.reward_scaling"
    changes = {f"{key}.enabled": True, f"{key}.source_min": 1.0}
    assert_names(
        only(found(rule_loss.reward_source_range_is_ordered, changes)), f"{key}.source_min", f"{key}.source_max"
    )
    assert found(rule_loss.reward_source_range_is_ordered, {**changes, f"{key}.source_max": 2.0}) == []


def test_warm_up_ends_before_the_decay():
    key = f"{MEGATRON}.scheduler"
    changes = {f"{key}.lr_decay_style": "cosine", f"{key}.lr_decay_iters": 10, f"{key}.lr_warmup_iters": 10}
    assert_names(
        only(found(rule_loss.warm_up_ends_before_the_decay, changes)), f"{key}.lr_warmup_iters", f"{key}.lr_decay_iters"
    )
    assert found(rule_loss.warm_up_ends_before_the_decay, {**changes, f"{key}.lr_decay_style": "constant"}) == []


def test_a_decay_does_not_raise_the_rate():
    changes = {f"{MEGATRON}.scheduler.lr_decay_style": "linear", f"{MEGATRON}.optimizer.lr": 1e-7}
    assert_names(only(found(rule_loss.decay_does_not_raise_the_rate, changes)), "optimizer.min_lr", "optimizer.lr")
    assert found(rule_loss.decay_does_not_raise_the_rate, {f"{MEGATRON}.optimizer.lr": 1e-7}) == []
