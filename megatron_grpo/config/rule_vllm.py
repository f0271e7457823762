"""Rules on vLLM as the generation backend: placement, engine, sizes. Whether it is installed is asked when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .schema import Recipe

# What vLLM's attention for CPUs was compiled for.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
VLLM = "policy.generation.vllm_cfg"


def vllm_has_its_own_gpus(recipe: Recipe, _: Facts) -> Iterator[str]:
    generation = recipe.policy.generation
    if generation.backend != "vllm" or not generation.colocated.enabled:
        return
    why = "async vLLM never shares the trainer's GPUs" if recipe.grpo.async_grpo.enabled else "not supported yet"
    yield (
        f"policy.generation.colocated.enabled: true with policy.generation.backend: vllm: {why}; set "
        "policy.generation.colocated.enabled=false and its resources, or policy.generation.backend=megatron"
    )


def vllm_async_needs_its_async_engine(recipe: Recipe, _: Facts) -> Iterator[str]:
    generation, async_grpo = recipe.policy.generation, recipe.grpo.async_grpo
    if generation.backend != "vllm" or not async_grpo.enabled or generation.vllm_cfg.async_engine:
        return
    asked = "grpo.async_grpo.enabled: true"
    if async_grpo.in_flight_weight_updates:
        asked += " and grpo.async_grpo.in_flight_weight_updates: true"
    yield f"{VLLM}.async_engine is false, but {asked} needs it: set it to true"


def vllm_experts_follow_its_tensor_parallelism(recipe: Recipe, _: Facts) -> Iterator[str]:
    vllm = recipe.policy.generation.vllm_cfg
    if recipe.policy.generation.backend != "vllm" or vllm.expert_parallel_size in (1, vllm.tensor_parallel_size):
        return
    yield (
        f"{VLLM}.expert_parallel_size = {vllm.expert_parallel_size} must be 1 or {VLLM}.tensor_parallel_size = "
        f"{vllm.tensor_parallel_size}: vLLM spreads experts over the ranks of a replica"
    )


def vllm_replicas_stay_on_a_node(recipe: Recipe, _: Facts) -> Iterator[str]:
    generation, cluster = recipe.policy.generation, recipe.cluster
    size = generation.vllm_cfg.tensor_parallel_size * generation.vllm_cfg.pipeline_parallel_size
    gpus = generation.colocated.resources.gpus_per_node or cluster.gpus_per_node
    if generation.backend == "vllm" and not generation.colocated.enabled and cluster.num_nodes > 1 and gpus % size:
        yield (
            f"{VLLM}.tensor_parallel_size x pipeline_parallel_size = {size} does not divide the {gpus} GPUs of a "
            "generation node (policy.generation.colocated.resources.gpus_per_node): a replica stays on one node"
        )


def head_size_fault(recipe: Recipe) -> str | None:
    """Why vLLM cannot run the model on a CPU. Asked when the accelerator is known: `auto` may be either."""
    model = recipe.policy.architecture
    if model is None or model.head_dim in CPU_HEAD_SIZES:
        return None
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    return (
        f"policy.model_config.head_dim = {model.head_dim}: vLLM on a CPU knows heads of {sizes} only; change it, or "
        "generate with policy.generation.backend=megatron"
    )
