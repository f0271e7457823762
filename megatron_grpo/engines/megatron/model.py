"""Builds one rank's model from the recipe: Qwen3-style decoders as a HybridModel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from ...errors import ConfigError
from ...layout import generation_sizes, train_sizes
from ...platform.device import Accelerator
from .init import InitStds, initialise
from .layers import ATTENTION_THEN_MLP, active_layer_spec, stack_spec
from .vocabulary import mask_padded_ids, padded_vocab_size

if TYPE_CHECKING:
    from ...config.policy_schema import ModelArchitecture
    from ...config.schema import Recipe
    from ...layout import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(recipe: Recipe, world: World, vocab_size: int, accelerator: Accelerator) -> HybridModel:
    """This rank's part of the policy, randomly initialised, on the accelerator's device; `init_world` ran before.

    `vocab_size` counts the tokenizer's ids. The model's own vocabulary is larger (`vocabulary.padded_vocab_size`);
    logits of padded ids are -inf.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = assemble_model(recipe, world, vocab_size, accelerator, groups)
    initialise(model, InitStds.from_recipe(recipe), recipe.policy.model_init.seed, vocab_size)
    return model


def assemble_model(
    recipe: Recipe, world: World, vocab_size: int, accelerator: Accelerator, groups: ProcessGroupCollection
) -> HybridModel:
    """`build_model` over process groups of the caller's, which are cut as `world` says; weights are left unset."""
    shape = _architecture(recipe)
    spec_name = active_layer_spec(recipe.policy.megatron_cfg.layer_spec, accelerator)
    padded_size = padded_vocab_size(vocab_size, world.tp, train_sizes(recipe).tp, generation_sizes(recipe).tp)
    model = HybridModel(
        config=transformer_config(recipe, world, accelerator),
        hybrid_stack_spec=stack_spec(spec_name),
        vocab_size=padded_size,
        max_sequence_length=shape.max_position_embeddings,
        hybrid_layer_pattern=layer_pattern(shape.num_hidden_layers, world.pp),
        pre_process=get_pg_rank(groups.pp) == 0,
        post_process=get_pg_rank(groups.pp) == get_pg_size(groups.pp) - 1,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        pg_collection=groups,
    )
    model.to(accelerator.device)
    if model.post_process:
        mask_padded_ids(model.output_layer, vocab_size, padded_size)
    return model


def transformer_config(recipe: Recipe, world: World, accelerator: Accelerator) -> TransformerConfig:
    """The Megatron configuration; fused kernels only where the device has them."""
    shape, precision = _architecture(recipe), DTYPES[recipe.policy.precision]
    return TransformerConfig(
        num_layers=len(ATTENTION_THEN_MLP) * shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        context_parallel_size=world.cp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        sequence_parallel=world.sequence_parallel,
        bf16=precision is torch.bfloat16,
        params_dtype=precision,
        pipeline_dtype=precision,
        # every weight is drawn by `initialise`, the same for each layout
        perform_initialization=False,
        use_cpu_initialization=not accelerator.is_cuda,
        # gradients are summed over micro-batches and ranks; the loss is already divided by the global count
        calculate_per_token_loss=True,
        bias_activation_fusion=recipe.policy.megatron_cfg.bias_activation_fusion and accelerator.is_cuda,
        bias_dropout_fusion=accelerator.is_cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def layer_pattern(num_layers: int, pp: int) -> str:
    """Attention and MLP in turn; `|` separates pipeline stages.  E.g. 4 layers, pp 2 -> `*-*-|*-*-`."""
    if num_layers % pp:
        raise ConfigError(f"policy.model_config.num_hidden_layers {num_layers} is not divisible by pp {pp}")
    return "|".join([ATTENTION_THEN_MLP * (num_layers // pp)] * pp)


def _architecture(recipe: Recipe) -> ModelArchitecture:
    if recipe.policy.architecture is None:
        raise ConfigError(
            f"policy.model_name {recipe.policy.model_name}: only models from scratch are available yet; "
            "set policy.model_name=scratch and policy.model_config"
        )
    return recipe.policy.architecture
