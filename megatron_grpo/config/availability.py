"""What a valid recipe may ask for but this version cannot do yet. One function per feature: it is deleted when the
feature arrives. `train` refuses these, `check` prints them as notes.
"""

from __future__ import annotations

from collections.abc import Callable

from ..layout import generation_sizes, train_sizes
from .dependent import SCRATCH
from .schema import Recipe

MCORE = "policy.generation.mcore_generation_config"


def _in_flight_updates(recipe: Recipe) -> str | None:
    async_grpo = recipe.grpo.async_grpo
    if async_grpo.enabled and async_grpo.in_flight_weight_updates:
        return "grpo.async_grpo.in_flight_weight_updates: true"
    return None


def _other_kv_cache_modes(recipe: Recipe) -> str | None:
    mode = recipe.policy.generation.mcore_generation_config.kv_cache_management_mode
    if recipe.policy.generation.backend == "megatron" and mode in ("offload", "recompute"):
        return f"{MCORE}.kv_cache_management_mode: {mode}"
    return None


def _prefix_caching(recipe: Recipe) -> str | None:
    generation = recipe.policy.generation
    if generation.backend == "megatron" and generation.mcore_generation_config.enable_prefix_caching:
        return f"{MCORE}.enable_prefix_caching: true"
    return None


def _checkpoints(recipe: Recipe) -> str | None:
    return "checkpointing.enabled: true" if recipe.checkpointing.enabled else None


def _other_backends(recipe: Recipe) -> str | None:
    backend = recipe.policy.generation.backend
    return f"policy.generation.backend: {backend}" if backend != "megatron" else None


def _stop_strings(recipe: Recipe) -> str | None:
    generation = recipe.policy.generation
    if generation.backend == "megatron" and generation.stop_strings:
        return "policy.generation.stop_strings with Megatron generation (use policy.generation.stop_token_ids)"
    return None


def _pipeline_parallel(recipe: Recipe) -> str | None:
    size = recipe.policy.megatron_cfg.pipeline_model_parallel_size
    return f"policy.megatron_cfg.pipeline_model_parallel_size: {size}" if size > 1 else None


def _context_parallel(recipe: Recipe) -> str | None:
    size = recipe.policy.megatron_cfg.context_parallel_size
    return f"policy.megatron_cfg.context_parallel_size: {size}" if size > 1 else None


def _expert_parallel(recipe: Recipe) -> str | None:
    megatron = recipe.policy.megatron_cfg
    if megatron.expert_model_parallel_size > 1:
        return f"policy.megatron_cfg.expert_model_parallel_size: {megatron.expert_model_parallel_size}"
    if megatron.expert_tensor_parallel_size > 1:
        return f"policy.megatron_cfg.expert_tensor_parallel_size: {megatron.expert_tensor_parallel_size}"
    return None


def _sequence_packing(recipe: Recipe) -> str | None:
    return "policy.sequence_packing.enabled: true" if recipe.policy.sequence_packing.enabled else None


def _own_inference_layout(recipe: Recipe) -> str | None:
    wanted, policy = generation_sizes(recipe).tp, train_sizes(recipe).tp
    if recipe.policy.generation.backend == "megatron" and wanted != policy:
        return f"{MCORE}.tensor_model_parallel_size: {wanted} (the policy's is {policy})"
    return None


def _pretrained_models(recipe: Recipe) -> str | None:
    name = recipe.policy.model_name
    return f"policy.model_name: {name} (only {SCRATCH!r} with policy.model_config)" if name != SCRATCH else None


def _data_by_name(recipe: Recipe) -> str | None:
    name = recipe.data.train.dataset_name if recipe.data.train else None
    return f"data.train.dataset_name: {name} (save it as a file and set data.train.path)" if name else None


def _streaming_data(recipe: Recipe) -> str | None:
    streaming = recipe.data.train is not None and recipe.data.train.streaming
    return "data.train.streaming: true" if streaming else None


def _several_turns(recipe: Recipe) -> str | None:
    turns = recipe.grpo.max_rollout_turns
    return f"grpo.max_rollout_turns: {turns}" if turns > 1 else None


def _dynamic_sampling(recipe: Recipe) -> str | None:
    return "grpo.use_dynamic_sampling: true" if recipe.grpo.use_dynamic_sampling else None


def _reward_shaping(recipe: Recipe) -> str | None:
    return "grpo.reward_shaping.enabled: true" if recipe.grpo.reward_shaping.enabled else None


def _reward_scaling(recipe: Recipe) -> str | None:
    return "grpo.reward_scaling.enabled: true" if recipe.grpo.reward_scaling.enabled else None


FEATURES: tuple[Callable[[Recipe], str | None], ...] = (
    _in_flight_updates,
    _other_kv_cache_modes,
    _prefix_caching,
    _checkpoints,
    _other_backends,
    _stop_strings,
    _pipeline_parallel,
    _context_parallel,
    _expert_parallel,
    _sequence_packing,
    _own_inference_layout,
    _pretrained_models,
    _data_by_name,
    _streaming_data,
    _several_turns,
    _dynamic_sampling,
    _reward_shaping,
    _reward_scaling,
)


def not_available_yet(recipe: Recipe) -> list[str]:
    """One line per feature the recipe asks for that this version does not have."""
    asked = (feature(recipe) for feature in FEATURES)
    return [f"{text} is not available yet in this version" for text in asked if text]
