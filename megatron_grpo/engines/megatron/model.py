"""Builds one rank's part of the model from the recipe: Qwen3-style decoders as HybridModels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from ...errors import ConfigError
from ...layout import generation_sizes, train_sizes
from ...platform.device import Accelerator
from ...stages import StageEnds, stage_sizes
from .init import InitStds, initialise
from .layers import ATTENTION_THEN_MLP, active_layer_spec, stack_spec
from .vocabulary import mask_padded_ids, padded_vocab_size

if TYPE_CHECKING:
    from ...config.policy_schema import ModelArchitecture
    from ...config.schema import Recipe
    from ...layout import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_chunks(recipe: Recipe, world: World, vocab_size: int, accelerator: Accelerator) -> list[HybridModel]:
    """This rank's part of the policy, randomly initialised, on the accelerator's device; `init_world` ran before.

    One model for each chunk of an interleaved pipeline, the earliest first, else one in all. `vocab_size` counts the
    tokenizer's ids. The model's own vocabulary is larger (`vocabulary.padded_vocab_size`); logits of padded ids are
    -inf.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = [assemble_model(recipe, world, vocab_size, accelerator, groups, chunk) for chunk in range(world.vpp)]
    for chunk in chunks:
        initialise(chunk, InitStds.from_recipe(recipe), recipe.policy.model_init.seed, vocab_size)
    return chunks


def build_model(recipe: Recipe, world: World, vocab_size: int, accelerator: Accelerator) -> HybridModel:
    """`build_chunks` where a rank holds one run of layers, as every engine's does."""
    (model,) = build_chunks(recipe, world, vocab_size, accelerator)
    return model


def assemble_model(
    recipe: Recipe,
    world: World,
    vocab_size: int,
    accelerator: Accelerator,
    groups: ProcessGroupCollection,
    chunk: int = 0,
) -> HybridModel:
    """A chunk over process groups that are cut as `world` says; its weights are left unset."""
    shape = _architecture(recipe)
    spec_name = active_layer_spec(recipe.policy.megatron_cfg.layer_spec, accelerator)
    padded_size = padded_vocab_size(vocab_size, world.tp, train_sizes(recipe).tp, generation_sizes(recipe).tp)
    model = HybridModel(
        config=transformer_config(recipe, world, accelerator),
        hybrid_stack_spec=stack_spec(spec_name),
        vocab_size=padded_size,
        max_sequence_length=shape.max_position_embeddings,
        hybrid_layer_pattern=layer_pattern(layers_of_chunks(recipe, world)),
        pre_process=get_pg_rank(groups.pp) == 0 and chunk == 0,
        post_process=get_pg_rank(groups.pp) == get_pg_size(groups.pp) - 1 and chunk == world.vpp - 1,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        pg_collection=groups,
        vp_stage=chunk if world.vpp > 1 else None,
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
        moe_token_dispatcher_type="alltoall",  # Megatron's default takes no micro-batches of different shapes
        sequence_parallel=world.sequence_parallel,
        bf16=precision is torch.bfloat16,
        params_dtype=precision,
        pipeline_dtype=precision,
        virtual_pipeline_model_parallel_size=world.vpp if world.vpp > 1 else None,
        variable_seq_lengths=world.pp > 1,  # a stage learns the shape of each micro-batch from the one before it
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


def layers_of_chunks(recipe: Recipe, world: World) -> tuple[int, ...]:
    """How many of the model's layers each chunk of the pipeline holds."""
    try:
        return stage_sizes(
            _architecture(recipe).num_hidden_layers, world.pp, world.vpp, StageEnds.of_world(recipe, world.pp)
        )
    except ValueError as error:
        raise ConfigError(f"policy.megatron_cfg, a pipeline of {world.pp} x {world.vpp} stages: {error}") from None


def layer_pattern(chunks: Sequence[int]) -> str:
    """Attention and MLP in turn; `|` separates the chunks of pipeline stages.  E.g. (2, 1) -> `*-*-|*-`."""
    return "|".join(ATTENTION_THEN_MLP * num_layers for num_layers in chunks)


def _architecture(recipe: Recipe) -> ModelArchitecture:
    if recipe.policy.architecture is None:
        raise ConfigError(
            f"policy.model_name {recipe.policy.model_name}: only models from scratch are available yet; "
            "set policy.model_name=scratch and policy.model_config"
        )
    return recipe.policy.architecture
