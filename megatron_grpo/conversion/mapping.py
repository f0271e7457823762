"""Where every weight lives on both sides. One mapping, for the conversion tools and for live refits alike.

    mapping = WeightMapping(architecture_of(read_config(directory)))      # or of an inline model's values
    mapping.weights                                # every parameter once, in the model's order: a `Weight` each
    weight = mapping.of("decoder.layers.4.self_attention.linear_qkv.weight")   # a name in the WHOLE model

A parameter at a time, both ways, exactly (nothing is rounded; dtypes pass through):

    weight.to_hf(whole)                {HF name: tensor}; rows that only pad the vocabulary are gone
    weight.from_hf(tensors, padded)    the whole Megatron parameter; `padded` rows of vocabulary, zeros at the end
    weight.shard(whole, rank, size)    what a tensor-parallel rank holds; for `is_expert` expert-tensor-parallel
    weight.gather(shards)              the whole from the shards of all those ranks, in rank order

A live refit on a rank:

    for local_name, parameter in module.named_parameters():
        name = global_name(local_name, layer_numbers, first_expert)       # pipeline and expert parallel offsets
        if not mapping.is_copy(name):                                     # a tied output layer on the last stage
            shards = all_gather(parameter) over tp, for an expert over expert-tp
            send(mapping.of(name).to_hf(mapping.of(name).gather(shards)))

The names of Transformer Engine's fused modules and of its grouped experts are understood as those of local modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConversionError
from .architecture import Architecture
from .families import EMBEDDING, OUTPUT, TABLES, Kind, Rule
from .layouts import GatedHalves, Layout, Plain, QueryGroups

_TRANSFORMER_ENGINE = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$"), r"experts.local_experts.\3.\1.\2"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One Megatron parameter: its name in the whole model, and its Hugging Face tensors with their shapes."""

    name: str
    hf: Mapping[str, tuple[int, ...]]
    layout: Layout
    is_expert: bool
    is_vocabulary: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, without padding of the vocabulary: every layout stacks rows."""
        shapes = list(self.hf.values())
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def to_hf(self, whole: Tensor) -> dict[str, Tensor]:
        """Raises ConversionError for another shape. The tensors may share memory with `whole`."""
        if self.is_vocabulary and whole.shape[0] >= self.shape[0]:
            whole = whole[: self.shape[0]]
        self._check(self.name, whole, self.shape)
        return dict(zip(self.hf, self.layout.split(whole), strict=True))

    def from_hf(self, tensors: Mapping[str, Tensor], padded_vocab_size: int | None = None) -> Tensor:
        """Raises ConversionError for a missing tensor or another shape. May share memory with what it got."""
        for name, shape in self.hf.items():
            if name not in tensors:
                raise ConversionError(f"tensor {name} is missing (for {self.name})")
            self._check(name, tensors[name], shape)
        whole = self.layout.join([tensors[name] for name in self.hf])
        if not self.is_vocabulary or padded_vocab_size is None:
            return whole
        return torch.nn.functional.pad(whole, (0, 0, 0, padded_vocab_size - whole.shape[0]))

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return self.layout.shard(whole, rank, size)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        return self.layout.gather(shards)

    @staticmethod
    def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            found = "x".join(map(str, tensor.shape))
            raise ConversionError(f"tensor {name} has shape {found}, expected {'x'.join(map(str, shape))}")


class WeightMapping:
    """All weights of an architecture."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self.weights: tuple[Weight, ...] = tuple(_weights(architecture))
        self._by_name = {weight.name: weight for weight in self.weights}
        self._by_hf_name = {name: weight for weight in self.weights for name in weight.hf}

    @property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for weight in self.weights for name, shape in weight.hf.items()}

    def of(self, name: str) -> Weight:
        """By the Megatron name in the whole model. The copy of a tied embedding is the embedding.

        Raises ConversionError for a parameter that the family does not have.
        """
        if self.is_copy(name):
            name = EMBEDDING
        try:
            return self._by_name[local_module_name(name)]
        except KeyError:
            raise ConversionError(f"{name} is no parameter of the family {self.architecture.family}") from None

    def of_hf(self, name: str) -> Weight:
        """Whose part the Hugging Face tensor `name` is. Raises ConversionError."""
        try:
            return self._by_hf_name[name]
        except KeyError:
            raise ConversionError(f"{name} is no tensor of the family {self.architecture.family}") from None

    def is_copy(self, name: str) -> bool:
        """Whether a parameter repeats another one: the output layer of a tied model with several pipeline stages."""
        return self.architecture.tied and name == OUTPUT


def global_name(local_name: str, layer_numbers: Sequence[int], first_expert: int = 0) -> str:
    """A parameter's name in the whole model, from its name on one rank.

    `layer_numbers[i]` is the number, from 0, of the i-th layer of this pipeline stage (`layer.layer_number - 1`);
    `first_expert` the number of the first expert of this expert-parallel rank. Raises ValueError for more layers.
    E.g. `decoder.layers.0.x` of a stage that starts at layer 4 -> `decoder.layers.4.x`.
    """
    name = local_module_name(local_name)
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is None:
        return name
    if int(layer[1]) >= len(layer_numbers):
        raise ValueError(f"{local_name}: this stage has {len(layer_numbers)} layers")
    rest = re.sub(
        r"\.local_experts\.(\d+)\.", lambda expert: f".local_experts.{int(expert[1]) + first_expert}.", name[layer.end() :]
    )
    return f"decoder.layers.{layer_numbers[int(layer[1])]}.{rest}"


def local_module_name(name: str) -> str:
    """The name that a module of Transformer Engine has when it is one of Megatron's own."""
    for pattern, replacement in _TRANSFORMER_ENGINE:
        name = pattern.sub(replacement, name)
    return name


def _weights(architecture: Architecture) -> Iterator[Weight]:
    table, sizes = TABLES[architecture.family], _sizes(architecture)
    yield from (_weight(rule, architecture, sizes) for rule in table.first)
    for number, symbol in enumerate(architecture.pattern):
        megatron, hf = f"decoder.layers.{number}.", f"model.layers.{number // table.layers_per_hf_layer}."
        for rule in table.layers[symbol]:
            for expert in range(sizes["e"]) if "{expert}" in rule.megatron else (None,):
                yield _weight(rule, architecture, sizes, megatron=megatron, hf=hf, expert=expert)
    yield from (
        _weight(rule, architecture, sizes)
        for rule in table.last
        if not (rule.megatron == OUTPUT and architecture.tied)
    )


def _weight(
    rule: Rule,
    architecture: Architecture,
    sizes: Mapping[str, int],
    *,
    megatron: str = "",
    hf: str = "",
    expert: int | None = None,
) -> Weight:
    return Weight(
        name=megatron + rule.megatron.format(expert=expert),
        hf={
            hf + name.format(expert=expert): tuple(sizes[letter] for letter in shape.split())
            for name, shape in rule.hf.items()
        },
        layout=_layout(rule.kind, architecture),
        is_expert=expert is not None,
        is_vocabulary=rule.kind is Kind.VOCABULARY,
    )


def _layout(kind: Kind, architecture: Architecture) -> Layout:
    if kind is Kind.QUERY_GROUPS:
        groups = architecture.num_kv_heads
        return QueryGroups(num_groups=groups, heads_per_group=architecture.num_heads // groups)
    if kind is Kind.GATED:
        return GatedHalves()
    return Plain({Kind.WHOLE: None, Kind.ROWS: 0, Kind.VOCABULARY: 0, Kind.COLUMNS: 1}[kind])


def _sizes(architecture: Architecture) -> dict[str, int]:
    experts = architecture.experts
    return {
        "v": architecture.vocab_size,
        "h": architecture.hidden_size,
        "q": architecture.num_heads * architecture.head_dim,
        "k": architecture.num_kv_heads * architecture.head_dim,
        "d": architecture.head_dim,
        "f": architecture.intermediate_size,
        "e": experts.num if experts else 0,
        "x": experts.intermediate_size if experts else 0,
    }
