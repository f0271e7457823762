"""Which modules the layers are made of: Megatron's own ("local") or Transformer Engine ("te").

Layer symbols of the hybrid pattern built here: `*` attention, `-` gated MLP.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ...errors import ConfigError
from ...platform.device import Accelerator

LayerSpecName = Literal["local", "te"]
ATTENTION_THEN_MLP = "*-"


def active_layer_spec(setting: str, accelerator: Accelerator) -> LayerSpecName:
    """What `policy.megatron_cfg.layer_spec` (auto | local | te) means here: TE only runs on CUDA."""
    usable = HAVE_TE and accelerator.is_cuda
    if setting == "te" and not usable:
        raise ConfigError(
            "policy.megatron_cfg.layer_spec is te, but "
            + ("Transformer Engine needs CUDA" if HAVE_TE else "transformer_engine cannot be imported")
            + ": use auto or local"
        )
    return "te" if usable and setting != "local" else "local"


def stack_spec(name: LayerSpecName) -> ModuleSpec:
    """The HybridModel stack for attention with query-key norm and gated MLPs."""
    return _transformer_engine_stack() if name == "te" else _local_stack()


class ShardedNorm:
    """Builds torch's RMSNorm whose gradient Megatron sums over sequence-parallel ranks.

    Megatron's own WrappedTorchNorm refuses sequence parallelism; all it lacks is this mark on the parameter.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused) -> torch.nn.RMSNorm:
        assert config.normalization == "RMSNorm", config.normalization
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class LocalStack(HybridStack):
    """HybridStack without Transformer Engine: the parent hard-wires TENorm as its final norm."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, **kwargs):
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = ShardedNorm(config, config.hidden_size, config.layernorm_epsilon)


def _local_stack() -> ModuleSpec:
    parts = get_gpt_layer_local_submodules(normalization="RMSNorm")
    attention = _with_query_key_norm(parts.self_attention, ShardedNorm)
    return ModuleSpec(
        module=LocalStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=ShardedNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=ShardedNorm, mlp=parts.mlp, mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )


def _transformer_engine_stack() -> ModuleSpec:
    shipped = hybrid_stack_spec.submodules
    layer = shipped.attention_layer.submodules
    attention = _with_query_key_norm(layer.self_attention, TENorm)
    normed = dataclasses.replace(
        shipped.attention_layer, submodules=dataclasses.replace(layer, self_attention=attention)
    )
    return ModuleSpec(module=hybrid_stack_spec.module, submodules=dataclasses.replace(shipped, attention_layer=normed))


def _with_query_key_norm(attention: ModuleSpec, norm: type) -> ModuleSpec:
    parts = dataclasses.replace(attention.submodules, q_layernorm=norm, k_layernorm=norm)
    return dataclasses.replace(attention, submodules=parts)
