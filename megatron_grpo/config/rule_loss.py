"""Rules on the objective and its schedule: truncation, clip ranges, reward transforms, learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .schema import Recipe

TRUNCATION = "loss_fn.truncated_importance_sampling"
MEGATRON = "policy.megatron_cfg"


def truncation_ratio_has_a_type(recipe: Recipe, _: Facts) -> Iterator[str]:
    loss = recipe.loss_fn
    if loss.truncated_importance_sampling_type is not None:
        return
    given = {
        f"{TRUNCATION}_ratio": loss.truncated_importance_sampling_ratio,
        f"{TRUNCATION}_ratio_min": loss.truncated_importance_sampling_ratio_min,
    }
    for key, value in given.items():
        if value is not None:
            yield f"{key} is {value} without {TRUNCATION}_type: set the type to tis, icepop or seq-mask-tis"


def truncation_type_has_a_ratio(recipe: Recipe, _: Facts) -> Iterator[str]:
    kind = recipe.loss_fn.truncated_importance_sampling_type
    if kind is not None and recipe.loss_fn.truncated_importance_sampling_ratio is None:
        yield f"{TRUNCATION}_type is {kind} without {TRUNCATION}_ratio, its upper end"


def truncation_range_is_ordered(recipe: Recipe, _: Facts) -> Iterator[str]:
    low = recipe.loss_fn.truncated_importance_sampling_ratio_min
    high = recipe.loss_fn.truncated_importance_sampling_ratio
    if low is not None and high is not None and low > high:
        yield f"{TRUNCATION}_ratio_min = {low} is above {TRUNCATION}_ratio = {high}"


def dual_clip_is_above_one(recipe: Recipe, _: Facts) -> Iterator[str]:
    cap = recipe.loss_fn.ratio_clip_c
    if cap is not None and cap <= 1.0:
        yield f"loss_fn.ratio_clip_c is {cap}: the dual clip must be > 1 (null switches it off)"


def overlong_buffer_fits_the_response(recipe: Recipe, _: Facts) -> Iterator[str]:
    shaping = recipe.grpo.reward_shaping
    if shaping.enabled and not 1 <= shaping.overlong_buffer_length <= shaping.max_response_length:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length = {shaping.overlong_buffer_length} is not between 1 and "
            f"grpo.reward_shaping.max_response_length = {shaping.max_response_length}"
        )


def reward_source_range_is_ordered(recipe: Recipe, _: Facts) -> Iterator[str]:
    scaling = recipe.grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield (
            f"grpo.reward_scaling.source_min = {scaling.source_min} is not below "
            f"grpo.reward_scaling.source_max = {scaling.source_max}"
        )


def warm_up_ends_before_the_decay(recipe: Recipe, _: Facts) -> Iterator[str]:
    plan = recipe.policy.megatron_cfg.scheduler
    if plan.lr_decay_style != "constant" and plan.lr_warmup_iters >= plan.lr_decay_iters:
        yield (
            f"{MEGATRON}.scheduler.lr_warmup_iters = {plan.lr_warmup_iters} must be below "
            f"{MEGATRON}.scheduler.lr_decay_iters = {plan.lr_decay_iters} (both count updates)"
        )


def decay_does_not_raise_the_rate(recipe: Recipe, _: Facts) -> Iterator[str]:
    megatron = recipe.policy.megatron_cfg
    low, start = megatron.optimizer.min_lr, megatron.optimizer.lr
    if megatron.scheduler.lr_decay_style != "constant" and low > start:
        yield f"{MEGATRON}.optimizer.min_lr = {low:g} is above {MEGATRON}.optimizer.lr = {start:g}"
