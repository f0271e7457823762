"""Rules on how a run generates and updates weights: backend, placement, KV cache, importance weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from .dependent import SCRATCH
from .facts import Facts
from .schema import Recipe

BACKEND_GROUP = "megatron_grpo.generation"
SHIPPED_BACKENDS = ("megatron", "vllm")
KV_MODES = ("persist", "offload", "recompute")
RECOMPUTE = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
KV_MODE = "policy.generation.mcore_generation_config.kv_cache_management_mode"
CORRECTION = "loss_fn.use_importance_sampling_correction"


def installed_backends() -> tuple[str, ...]:
    """The shipped generation backends and those that other packages register as entry points."""
    return tuple(dict.fromkeys((*SHIPPED_BACKENDS, *(found.name for found in entry_points(group=BACKEND_GROUP)))))


def megatron_trains(recipe: Recipe, _: Facts) -> Iterator[str]:
    if not recipe.policy.megatron_cfg.enabled:
        yield "policy.megatron_cfg.enabled: false is not supported; Megatron-Core is the only trainer here"


def backend_is_installed(recipe: Recipe, _: Facts) -> Iterator[str]:
    backend, installed = recipe.policy.generation.backend, installed_backends()
    if backend not in installed:
        yield (
            f"policy.generation.backend: {backend!r} is not installed; installed backends: {', '.join(installed)}; "
            f"a package adds one through the entry point group {BACKEND_GROUP!r}"
        )


def training_samples_are_not_filtered(recipe: Recipe, _: Facts) -> Iterator[str]:
    """The trainer divides its logits by the temperature, as every engine does, but knows no filters."""
    generation = recipe.policy.generation
    if generation.top_k is not None:
        yield _filtered("top_k", generation.top_k, "null")
    if generation.top_p < 1:
        yield _filtered("top_p", generation.top_p, "1.0")


def _filtered(key: str, value: object, neutral: str) -> str:
    return (
        f"policy.generation.{key} = {value}: the trainer's log-probs are those of the unfiltered distribution, so that "
        f"ratios and importance weights would be wrong; set it to {neutral} (policy.generation.val_{key} is free)"
    )


def kv_cache_mode_is_known(recipe: Recipe, _: Facts) -> Iterator[str]:
    mode = recipe.policy.generation.mcore_generation_config.kv_cache_management_mode
    if recipe.policy.generation.backend == "megatron" and mode is not None and mode not in KV_MODES:
        yield f"{KV_MODE}: {mode!r} is none of {', '.join(KV_MODES)}"


def kv_cache_mode_agrees_with_recompute(recipe: Recipe, _: Facts) -> Iterator[str]:
    """`recompute` frees the cache on suspend and must be announced; the other modes keep it and must not be."""
    if recipe.policy.generation.backend != "megatron" or not recipe.grpo.async_grpo.enabled:
        return
    recompute = recipe.grpo.async_grpo.recompute_kv_cache_after_weight_updates
    mode = recipe.policy.generation.mcore_generation_config.kv_cache_management_mode or "persist"
    if mode not in KV_MODES or recompute == (mode == "recompute"):
        return
    if recompute:
        ways = f"set {KV_MODE}=recompute, or {RECOMPUTE}=false"
    else:
        ways = f"set {RECOMPUTE}=true, or {KV_MODE}=persist (or offload)"
    yield f"{RECOMPUTE}: {str(recompute).lower()} does not agree with {KV_MODE}: {mode}; {ways}"


def async_corrects_importance(recipe: Recipe, _: Facts) -> Iterator[str]:
    if recipe.grpo.async_grpo.enabled and not recipe.loss_fn.use_importance_sampling_correction:
        yield (
            f"{CORRECTION} must be set to true with grpo.async_grpo.enabled: true: tokens come from older weights "
            "than the ones they train"
        )


def scratch_model_is_described(recipe: Recipe, _: Facts) -> Iterator[str]:
    policy = recipe.policy
    if policy.model_name == SCRATCH and policy.architecture is None:
        yield f"policy.model_config must describe the model when policy.model_name is {SCRATCH!r}"


def transformer_engine_needs_cuda(recipe: Recipe, _: Facts) -> Iterator[str]:
    if recipe.policy.megatron_cfg.layer_spec == "te" and recipe.cluster.accelerator == "cpu":
        yield (
            "policy.megatron_cfg.layer_spec: te needs CUDA, but cluster.accelerator is cpu; "
            "use policy.megatron_cfg.layer_spec=local or auto"
        )
