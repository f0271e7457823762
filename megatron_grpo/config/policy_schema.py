"""The `policy` section: the trained model, its parallel layout and optimizer, and what generates.

Dtypes follow `policy.precision`; `config.aliases` writes them before validation.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import BelowOne, Count, CountOrZero, Items, Name, Positive, PositiveFraction, PositiveOrZero, Section, Seed

Dtype = Literal["bfloat16", "float32"]


class ModelArchitecture(Section):
    """`policy.model_config`: a Hugging Face style configuration, for models built from scratch."""

    model_type: Literal["qwen3"] = "qwen3"
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count | None = None
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    max_position_embeddings: Count = 4096
    tie_word_embeddings: bool = False


class ModelInit(Section):
    """Standard deviations of the random start; `hidden_std` null = hidden_size ** -0.5."""

    hidden_std: Positive | None = None
    embedding_std: Positive = 0.3
    output_std: Positive = 0.02
    seed: Seed = 1234


class TokenizerSource(Section):
    name: Name = "task"
    chat_template_kwargs: dict[str, Any] | None = None


class Optimizer(Section):
    lr: PositiveOrZero = 5e-6
    min_lr: PositiveOrZero = 5e-7
    weight_decay: PositiveOrZero = 0.01
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    adam_eps: Positive = 1e-8
    clip_grad: PositiveOrZero = 1.0
    bf16: bool = True
    use_distributed_optimizer: bool = True


class Scheduler(Section):
    """Learning-rate schedule. Iterations count optimizer updates, not steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    lr_decay_iters: Count = 1000
    lr_warmup_iters: CountOrZero = 13
    lr_warmup_init: PositiveOrZero = 5e-7
    start_weight_decay: PositiveOrZero = 0.01
    end_weight_decay: PositiveOrZero = 0.01


class DistributedDataParallel(Section):
    grad_reduce_in_fp32: bool = False


class MegatronConfig(Section):
    enabled: bool = True
    layer_spec: Literal["auto", "local", "te"] = "auto"
    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Count = 1
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    expert_tensor_parallel_size: Count = 1
    num_layers_in_first_pipeline_stage: Count | None = None
    num_layers_in_last_pipeline_stage: Count | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    sequence_parallel: bool = False
    pipeline_dtype: Dtype = "bfloat16"
    bias_activation_fusion: bool = True
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    distributed_data_parallel_config: DistributedDataParallel = DistributedDataParallel()


class SequencePacking(Section):
    enabled: bool = False
    train_mb_tokens: Count | None = None
    logprob_mb_tokens: Count | None = None
    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing", "concatenative"] = (
        "modified_first_fit_decreasing"
    )
    sequence_length_round: Count = 64


class Resources(Section):
    """What is set apart for generation when it does not share the trainer's GPUs."""

    num_nodes: Count | None = None
    gpus_per_node: Count | None = None


class Colocated(Section):
    enabled: bool = True
    resources: Resources = Resources()


class McoreGenerationConfig(Section):
    """The Megatron dynamic inference engine."""

    kv_cache_management_mode: Name | None = "persist"
    tensor_model_parallel_size: Count | None = None
    pipeline_model_parallel_size: Count | None = None
    max_model_len: Count | None = None
    buffer_size_gb: Positive = 10.0
    block_size_tokens: Count = 256
    max_tokens: Count = 16384
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False


class VllmConfig(Section):
    async_engine: bool = False
    precision: Dtype = "bfloat16"
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    gpu_memory_utilization: PositiveFraction = 0.6
    max_model_len: Count | None = None
    enforce_eager: bool = False


class Generation(Section):
    backend: Name = "megatron"
    backend_options: dict[str, Any] | None = None  # handed to a backend of another package
    max_new_tokens: Count = 512
    temperature: Positive = 1.0
    top_p: PositiveFraction = 1.0
    top_k: Count | None = None
    val_temperature: PositiveOrZero = 1.0
    val_top_p: PositiveFraction = 1.0
    val_top_k: Count | None = None
    stop_token_ids: Items[CountOrZero] | None = None
    stop_strings: Items[Name] | None = None
    colocated: Colocated = Colocated()
    mcore_generation_config: McoreGenerationConfig = McoreGenerationConfig()
    vllm_cfg: VllmConfig = VllmConfig()


class Policy(Section):
    model_name: Name = "scratch"
    architecture: ModelArchitecture | None = Field(default=None, alias="model_config")
    model_init: ModelInit = ModelInit()
    tokenizer: TokenizerSource = TokenizerSource()
    precision: Dtype = "bfloat16"
    train_global_batch_size: Count = 512
    train_micro_batch_size: Count = 1
    logprob_batch_size: Count = 1
    max_total_sequence_length: Count = 512
    max_grad_norm: PositiveOrZero = 1.0
    megatron_cfg: MegatronConfig = MegatronConfig()
    sequence_packing: SequencePacking = SequencePacking()
    generation: Generation = Generation()
