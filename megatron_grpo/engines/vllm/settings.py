"""Which engine the recipe describes, in vLLM's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .channels import EXTENSION, GLOO, NCCL

if TYPE_CHECKING:
    from ...config.schema import Recipe

# On a CPU the cache is taken from the machine's memory, of which vLLM would reserve gpu_memory_utilization.
CPU_CACHE_BYTES = 64 << 20
CPU_BLOCK_TOKENS = 32

# Before vLLM is imported, in the engine's process and all its children.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers on one NUMA node
    "TORCHDYNAMO_DISABLE": "1",  # else the first request for log-probs compiles for most of a minute
}


def environment(recipe: Recipe, *, on_cuda: bool) -> dict[str, str]:
    ready = {"VLLM_ENGINE_READY_TIMEOUT_S": str(int(recipe.timeouts.actor_start))}
    return {**ENVIRONMENT, **ready, **({} if on_cuda else CPU_ENVIRONMENT)}


def engine_arguments(recipe: Recipe, folder: str, *, on_cuda: bool) -> Mapping[str, Any]:
    """Arguments of `AsyncEngineArgs`. Weights start as noise: those of the trainer arrive before the first request."""
    generation = recipe.policy.generation
    vllm = generation.vllm_cfg
    arguments = {
        "model": folder,
        "tokenizer": folder,
        "skip_tokenizer_init": not generation.stop_strings,  # token ids in and out, unless text ends a completion
        "load_format": "dummy",
        "dtype": recipe.policy.precision,
        "seed": recipe.grpo.seed,
        "max_model_len": vllm.max_model_len or recipe.policy.max_total_sequence_length,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "pipeline_parallel_size": vllm.pipeline_parallel_size,
        "enable_expert_parallel": vllm.expert_parallel_size > 1,
        # A single worker lives in the engine's process.
        "distributed_executor_backend": "mp" if vllm.tensor_parallel_size * vllm.pipeline_parallel_size > 1 else "uni",
        "enforce_eager": vllm.enforce_eager or not on_cuda,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "enable_prefix_caching": True,  # a group shares its prompt; versions are kept apart by salts
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after temperature and filters
        "generation_config": "vllm",  # the model's own file must not add a temperature or a filter
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": NCCL if on_cuda else GLOO},
        "worker_extension_cls": EXTENSION,
    }
    if not on_cuda:
        arguments |= {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "block_size": CPU_BLOCK_TOKENS}
    return arguments
