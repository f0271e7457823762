"""A tiny mixture of experts out of Megatron's own local layers, each expert filled with a number of its own."""

from __future__ import annotations

import re

import torch

NUM_EXPERTS = 4
VOCAB = 16


def build_experts(world, groups=None, *, base: float):
    """A rank's model; expert k holds base + k everywhere, all else base."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_grpo.engines.megatron.layers import ShardedNorm

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=8,
        moe_ffn_hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        sequence_parallel=world.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    layer = get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    # Megatron's own norm for local layers refuses sequence parallelism
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ShardedNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=ShardedNorm)
    model = GPTModel(
        config,
        block,
        vocab_size=VOCAB,
        max_sequence_length=16,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    fill(model, base)
    return model


def _expert_number(model, name: str) -> int | None:
    local = re.search(r"local_experts\.(\d+)\.", name)
    if local is None:
        return None
    return model.pg_collection.ep.rank() * (NUM_EXPERTS // model.pg_collection.ep.size()) + int(local[1])


@torch.no_grad()
def fill(model, base: float) -> None:
    for name, parameter in model.named_parameters():
        parameter.fill_(base + (_expert_number(model, name) or 0))


def misplaced(model, base: float) -> list[str]:
    """Parameters of this rank that do not hold what `fill` gives them."""
    return [
        name
        for name, parameter in model.named_parameters()
        if not bool((parameter == base + (_expert_number(model, name) or 0)).all())
    ]
