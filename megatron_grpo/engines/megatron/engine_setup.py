"""Builds Megatron's dynamic inference engine over a model, from the recipe."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode, MambaInferenceStateConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.module import MegatronModule

from ...errors import ConfigError
from .sampling import StreamSampling

if TYPE_CHECKING:
    from ...config.schema import Recipe

logger = logging.getLogger(__name__)

KEYS = "policy.generation.mcore_generation_config"
# Sizes are rounded so: requests to 4 and TP (the engine's batch rows), tokens to 64 (its padding).
REQUEST_MULTIPLE = 4
TOKEN_MULTIPLE = 64


class IdTokenizer:
    """What the engine sees as its tokenizer: text is a list of ids, so that stop tokens can be named to it."""

    bos = None
    eod = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return ""  # every reply would carry it; callers want ids


class SharedModuleEngine(DynamicInferenceEngine):
    """An engine whose module trains while it is suspended. `peer_timeout_s` bounds its wait for other ranks."""

    peer_timeout_s: float

    async def _world_barrier(self) -> None:
        """Megatron would wait for ever for a rank that died on the way to a common state."""
        await asyncio.wait_for(super()._world_barrier(), self.peer_timeout_s)

    def resume(self) -> None:
        """Runs on each rank's engine loop, so no rank can step before its module left training mode."""
        self.controller.inference_wrapped_model.model.eval()
        super().resume()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """Memory and batch sizes of one replica."""

    max_model_len: int
    max_requests: int
    num_blocks: int
    block_bytes: int

    @property
    def buffer_gb(self) -> float:
        return self.num_blocks * self.block_bytes / 1024**3


def engine_sizes(recipe: Recipe, *, block_bytes: int, tp: int) -> EngineSizes:
    """How many requests run at once and how many cache blocks they need.

    requests = min(what the loop keeps in flight, blocks in `buffer_size_gb` - 1, `max_tokens`); others queue.
    blocks   = what those requests need at full length + 1 (Megatron's dummy), at most `buffer_size_gb`; with prefix
    caching all of it, since free blocks hold the cache.
    """
    config, grpo = recipe.policy.generation.mcore_generation_config, recipe.grpo
    max_model_len = config.max_model_len or recipe.policy.max_total_sequence_length
    available = int(config.buffer_size_gb * 1024**3) // block_bytes
    per_request = math.ceil(max_model_len / config.block_size_tokens)
    age = grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else 0
    in_flight = (age + 1) * grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    multiple = math.lcm(REQUEST_MULTIPLE, tp)
    wanted = math.ceil(max(in_flight, recipe.grpo.max_val_samples) / multiple) * multiple
    max_requests = min(wanted, available - 1, config.max_tokens) // multiple * multiple
    if available <= per_request or max_requests < 1:
        raise ConfigError(
            f"{KEYS}.buffer_size_gb = {config.buffer_size_gb:g} holds {available} blocks of "
            f"{config.block_size_tokens} tokens ({block_bytes} bytes each); one request of {max_model_len} tokens "
            f"needs {per_request + 1}, a batch at least {multiple + 1}: raise it or lower block_size_tokens"
        )
    blocks = available if config.enable_prefix_caching else min(available, max_requests * per_request + 1)
    return EngineSizes(
        max_model_len=max_model_len, max_requests=max_requests, num_blocks=blocks, block_bytes=block_bytes
    )


def build_engine(module: MegatronModule, recipe: Recipe, vocab_size: int) -> DynamicInferenceEngine:
    """The engine of this rank over `module` (unwrapped, its parameters stay where they are). Collective over the world.

    Leaves the process in inference mode: training forwards need `suspend` first. Raises ConfigError for sizes that do
    not fit.
    """
    module.eval()
    _reserve_gather_buffer(module, recipe)
    context = _build_context(module, recipe)
    wrapper = GPTInferenceWrapper(module, context)
    controller = TextGenerationController(wrapper, IdTokenizer(vocab_size))
    engine = SharedModuleEngine(controller, context)
    engine.peer_timeout_s = recipe.timeouts.refit
    controller._sampling = StreamSampling(engine)  # Megatron chooses its backend by name and takes no instance
    if context.kv_cache_management_mode != KVCacheManagementMode.PERSIST:
        _shorten_collections()
    return engine


def _shorten_collections() -> None:
    """Exempt all objects of now, which live as long as the engine, from Python's garbage collector.

    Megatron collects garbage whenever a suspend frees the cache; over everything imported that takes 0.25 s per refit.
    """
    gc.collect()
    gc.freeze()


def _reserve_gather_buffer(module: MegatronModule, recipe: Recipe) -> None:
    """Allocate Megatron's shared buffer of sequence-parallel all-gathers at its largest, outside inference mode.

    It grows on demand; grown by the engine it would be an inference tensor, which a training forward cannot write to.
    """
    if module.config.sequence_parallel:
        numel = recipe.policy.generation.mcore_generation_config.max_tokens * module.config.hidden_size
        parallel_state.get_global_memory_buffer().get_tensor((numel,), module.config.params_dtype, "mpu")


def _build_context(module: MegatronModule, recipe: Recipe) -> DynamicInferenceContext:
    config = recipe.policy.generation.mcore_generation_config
    if config.max_tokens % TOKEN_MULTIPLE:
        raise ConfigError(f"{KEYS}.max_tokens is {config.max_tokens}: it must be a multiple of {TOKEN_MULTIPLE}")
    attention = attention_layers(module)
    model_config = _counting_only(module, attention)
    block_bytes = _block_bytes(model_config, config.block_size_tokens)
    sizes = engine_sizes(recipe, block_bytes=block_bytes, tp=model_config.tensor_model_parallel_size)
    if not config.enable_chunked_prefill and sizes.max_model_len > config.max_tokens:
        raise ConfigError(
            f"{KEYS}.enable_chunked_prefill: false needs max_tokens ({config.max_tokens}) of at least max_model_len "
            f"({sizes.max_model_len}): a request that is recomputed or evicted starts over with all of its tokens"
        )
    inference = InferenceConfig(
        block_size_tokens=config.block_size_tokens,
        buffer_size_gb=sizes.buffer_gb,
        max_requests=sizes.max_requests,
        max_tokens=config.max_tokens,
        max_sequence_length=sizes.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        kv_cache_management_mode=KVCacheManagementMode(config.kv_cache_management_mode or "persist"),
        mamba_inference_state_config=MambaInferenceStateConfig.from_model(module),
        # Log-probs of the sampling distribution, for generated tokens only.
        logprobs_mode="processed_logprobs",
        materialize_only_last_token_logits=True,
        # A pause is seen at the next step; Megatron's 20 steps save an all-reduce among expert-parallel ranks.
        ep_consensus_interval=1,
        num_cuda_graphs=None,
        # The model's own groups: parallel_state is the trainer's where the two are cut differently.
        pg_collection=module.pg_collection,
    )
    context = DynamicInferenceContext(model_config=model_config, inference_config=inference)
    if attention is not None:
        context.layer_map = {layer: slot for slot, layer in enumerate(attention)}
    logger.info(
        "engine: %d requests of up to %d tokens, %d cache blocks of %d tokens (%.3f GB)",
        sizes.max_requests, sizes.max_model_len, sizes.num_blocks, config.block_size_tokens, sizes.buffer_gb,
    )  # fmt: skip
    return context


def attention_layers(module: MegatronModule) -> list[int] | None:
    """Indices of this stage's attention layers in a HybridModel without Mamba layers, else None.

    Megatron gives every layer of such a stack a key/value cache, MLP layers too: half the memory would lie idle.
    """
    if Symbols.MAMBA in module.hybrid_layer_pattern:
        return None
    return [index for index, kind in enumerate(module.decoder.layer_type_list) if kind == Symbols.ATTENTION]


def _counting_only(module: MegatronModule, layers: list[int] | None):
    """The model's configuration with as many layers as have a cache; the context reads shapes from it, nothing else.

    Every stage of a pipeline counts those of the fullest one: all stages must have equally many cache blocks.
    """
    config = copy.copy(module.config)
    if layers is not None:
        stages = module.hybrid_layer_pattern.split(Symbols.PIPE)
        config.num_layers = len(stages) * max(stage.count(Symbols.ATTENTION) for stage in stages)
    return config


def _block_bytes(config, block_size_tokens: int) -> int:
    """Bytes of one cache block on this rank: keys and values of every layer with a cache."""
    groups = config.num_query_groups or config.num_attention_heads
    per_rank = max(1, groups // config.tensor_model_parallel_size)
    layers = config.num_layers // config.pipeline_model_parallel_size
    return config.params_dtype.itemsize * 2 * layers * block_size_tokens * per_rank * config.kv_channels
