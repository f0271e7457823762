"""What a valid recipe may ask for but this version cannot do yet. One function per feature: it is deleted when the
feature arrives. `train` refuses these, `check` prints them as notes.
"""

from __future__ import annotations

from collections.abc import Callable

from .dependent import SCRATCH
from .schema import Recipe

MCORE = "policy.generation.mcore_generation_config"


def _stop_strings(recipe: Recipe) -> str | None:
    generation = recipe.policy.generation
    if generation.backend == "megatron" and generation.stop_strings:
        return "policy.generation.stop_strings with Megatron generation (use policy.generation.stop_token_ids)"
    return None


def _interleaved_pipeline(recipe: Recipe) -> str | None:
    size = recipe.policy.megatron_cfg.virtual_pipeline_model_parallel_size
    return f"policy.megatron_cfg.virtual_pipeline_model_parallel_size: {size}" if size > 1 else None


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


FEATURES: tuple[Callable[[Recipe], str | None], ...] = (
    _stop_strings,
    _interleaved_pipeline,
    _context_parallel,
    _expert_parallel,
    _sequence_packing,
    _pretrained_models,
    _data_by_name,
    _streaming_data,
    _several_turns,
)


def not_available_yet(recipe: Recipe) -> list[str]:
    """One line per feature the recipe asks for that this version does not have."""
    asked = (feature(recipe) for feature in FEATURES)
    return [f"{text} is not available yet in this version" for text in asked if text]
