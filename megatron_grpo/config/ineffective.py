"""Keys that a recipe sets itself although they change nothing in the mode it chose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .dependent import SCRATCH
from .rule_modes import SHIPPED_BACKENDS
from .schema import Recipe
from .unsupported import foreign_backend, table


def keys_without_effect(recipe: Recipe, explicit: Iterable[str]) -> list[str]:
    """One line per reason, with all the keys it concerns."""
    inert = dict(_inert(recipe))
    by_reason: dict[str, list[str]] = {}
    for key in sorted(explicit):
        why = _reason(key, recipe, inert)
        if why:
            by_reason.setdefault(why, []).append(key)
    return [f"no effect ({why}): {', '.join(keys)}" for why, keys in by_reason.items()]


def _reason(key: str, recipe: Recipe, inert: dict[str, str]) -> str | None:
    backend = recipe.policy.generation.backend
    if foreign_backend(key, backend):
        return f"policy.generation.backend is {backend}"
    unused = table().unused | inert
    return next((why for prefix, why in unused.items() if key == prefix or key.startswith(f"{prefix}.")), None)


def _inert(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key or section, why nothing in it counts)."""
    yield from _inert_in_grpo(recipe)
    yield from _inert_in_loss(recipe)
    yield from _inert_in_policy(recipe)
    yield from _inert_around(recipe)


def _inert_in_grpo(recipe: Recipe) -> Iterator[tuple[str, str]]:
    grpo = recipe.grpo
    if not grpo.async_grpo.enabled:
        for name in (
            "max_trajectory_age_steps",
            "max_generation_failures",
            "in_flight_weight_updates",
            "recompute_kv_cache_after_weight_updates",
        ):
            yield f"grpo.async_grpo.{name}", "grpo.async_grpo.enabled is false"
    if not grpo.use_dynamic_sampling:
        yield "grpo.dynamic_sampling_max_gen_batches", "grpo.use_dynamic_sampling is false"
    if not grpo.reward_shaping.enabled:
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
            yield f"grpo.reward_shaping.{name}", "grpo.reward_shaping.enabled is false"
    if not grpo.reward_scaling.enabled:
        for name in ("source_min", "source_max", "target_min", "target_max"):
            yield f"grpo.reward_scaling.{name}", "grpo.reward_scaling.enabled is false"
    if recipe.data.validation is None:
        for name in ("val_period", "val_at_start", "val_at_end", "max_val_samples"):
            yield f"grpo.{name}", "data.validation is null"


def _inert_in_loss(recipe: Recipe) -> Iterator[tuple[str, str]]:
    loss = recipe.loss_fn
    if loss.reference_policy_kl_penalty == 0:
        for name in ("reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value"):
            yield f"loss_fn.{name}", "loss_fn.reference_policy_kl_penalty is 0"
    if not loss.use_importance_sampling_correction:
        for name in ("type", "ratio", "ratio_min"):
            yield f"loss_fn.truncated_importance_sampling_{name}", "loss_fn.use_importance_sampling_correction is false"
    if loss.use_cispo:
        yield "loss_fn.ratio_clip_c", "loss_fn.use_cispo is true"


def _inert_in_policy(recipe: Recipe) -> Iterator[tuple[str, str]]:
    policy, megatron = recipe.policy, recipe.policy.megatron_cfg
    if policy.model_name != SCRATCH:
        yield "policy.model_config", f"policy.model_name is {policy.model_name}"
        yield "policy.model_init", f"policy.model_name is {policy.model_name}"
    if policy.generation.backend in SHIPPED_BACKENDS:
        yield "policy.generation.backend_options", f"policy.generation.backend is {policy.generation.backend}"
    if policy.generation.colocated.enabled:
        yield "policy.generation.colocated.resources", "policy.generation.colocated.enabled is true"
    if not policy.sequence_packing.enabled:
        for name in ("train_mb_tokens", "logprob_mb_tokens", "algorithm", "sequence_length_round"):
            yield f"policy.sequence_packing.{name}", "policy.sequence_packing.enabled is false"
    if megatron.scheduler.lr_warmup_iters == 0:
        yield "policy.megatron_cfg.scheduler.lr_warmup_init", "policy.megatron_cfg.scheduler.lr_warmup_iters is 0"
    if megatron.scheduler.lr_decay_style == "constant":
        why = "policy.megatron_cfg.scheduler.lr_decay_style is constant"
        yield "policy.megatron_cfg.scheduler.lr_decay_iters", why
        yield "policy.megatron_cfg.optimizer.min_lr", why
    if megatron.pipeline_model_parallel_size == 1:
        for name in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ):
            yield f"policy.megatron_cfg.{name}", "policy.megatron_cfg.pipeline_model_parallel_size is 1"


def _inert_around(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not recipe.checkpointing.enabled:
        for name in type(recipe.checkpointing).model_fields:
            if name != "enabled":
                yield f"checkpointing.{name}", "checkpointing.enabled is false"
    if not recipe.logger.wandb_enabled:
        yield "logger.wandb", "logger.wandb_enabled is false"
    sources = [source for source in (recipe.data.train, recipe.data.validation) if source is not None]
    used = {source.env for source in sources}
    for name in recipe.env:
        if name not in used:
            yield f"env.{name}", f"no data source uses the environment {name!r}"
    for key, source in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if source is not None and source.path is not None:
            yield f"{key}.num_rows", f"{key}.path is set: the file's rows count"
