"""The tables: which Hugging Face tensors make up which Megatron parameter, per kind of layer.

A rule's sizes are letters: h hidden, q heads x head_dim, k kv heads x head_dim, d head_dim, f MLP width, e number of
experts, x an expert's width, v vocabulary. Names are relative to the layer: `decoder.layers.N.` (Megatron counts
attention and MLP as two layers) and `model.layers.n.` (n = N // 2). `{expert}` runs over the experts.

To add a family: an entry in `architecture.FAMILIES`, a `Table` here, a tiny model in tests/megatron/hf_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a parameter is arranged; `layouts` has one class for each."""

    WHOLE = "on every rank"
    ROWS = "cut by rows"
    COLUMNS = "cut by columns"
    GATED = "gate above up projection"
    QUERY_GROUPS = "queries, keys and values by group"
    VOCABULARY = "cut by rows, padded"


@dataclass(frozen=True, slots=True)
class Rule:
    """`hf`: names of the tensors in the order the layout joins them, each with its sizes."""

    megatron: str
    kind: Kind
    hf: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """`layers`: by the symbol of the layer in `Architecture.pattern`. `layers_per_hf_layer`: Megatron's count."""

    first: tuple[Rule, ...]
    layers: Mapping[str, tuple[Rule, ...]]
    last: tuple[Rule, ...]
    layers_per_hf_layer: int = 2


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

_FIRST = (Rule(EMBEDDING, Kind.VOCABULARY, {"model.embed_tokens.weight": "v h"}),)
_LAST = (
    Rule("decoder.final_norm.weight", Kind.WHOLE, {"model.norm.weight": "h"}),
    Rule(OUTPUT, Kind.VOCABULARY, {"lm_head.weight": "v h"}),  # left out where embeddings are tied
)

_ATTENTION = (
    Rule("input_layernorm.weight", Kind.WHOLE, {"input_layernorm.weight": "h"}),
    Rule(
        "self_attention.linear_qkv.weight",
        Kind.QUERY_GROUPS,
        {"self_attn.q_proj.weight": "q h", "self_attn.k_proj.weight": "k h", "self_attn.v_proj.weight": "k h"},
    ),
    Rule("self_attention.linear_proj.weight", Kind.COLUMNS, {"self_attn.o_proj.weight": "h q"}),
)
_QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    Kind.QUERY_GROUPS,
    {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "k", "self_attn.v_proj.bias": "k"},
)
_QK_NORM = (
    Rule("self_attention.q_layernorm.weight", Kind.WHOLE, {"self_attn.q_norm.weight": "d"}),
    Rule("self_attention.k_layernorm.weight", Kind.WHOLE, {"self_attn.k_norm.weight": "d"}),
)
_MLP_NORM = Rule("pre_mlp_layernorm.weight", Kind.WHOLE, {"post_attention_layernorm.weight": "h"})
_GATED_MLP = (
    _MLP_NORM,
    Rule("mlp.linear_fc1.weight", Kind.GATED, {"mlp.gate_proj.weight": "f h", "mlp.up_proj.weight": "f h"}),
    Rule("mlp.linear_fc2.weight", Kind.COLUMNS, {"mlp.down_proj.weight": "h f"}),
)
_GATED_EXPERTS = (
    _MLP_NORM,
    Rule("mlp.router.weight", Kind.WHOLE, {"mlp.gate.weight": "e h"}),
    Rule(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        Kind.GATED,
        {"mlp.experts.{expert}.gate_proj.weight": "x h", "mlp.experts.{expert}.up_proj.weight": "x h"},
    ),
    Rule(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        Kind.COLUMNS,
        {"mlp.experts.{expert}.down_proj.weight": "h x"},
    ),
)

TABLES: dict[str, Table] = {
    "llama": Table(_FIRST, {"*": _ATTENTION, "-": _GATED_MLP}, _LAST),
    "qwen2": Table(_FIRST, {"*": (*_ATTENTION, _QKV_BIAS), "-": _GATED_MLP}, _LAST),
    "qwen3": Table(_FIRST, {"*": (*_ATTENTION, *_QK_NORM), "-": _GATED_MLP}, _LAST),
    "qwen3_moe": Table(
        _FIRST, {"*": (*_ATTENTION, *_QK_NORM), "-": _GATED_MLP, "E": _GATED_EXPERTS}, _LAST
    ),
}
