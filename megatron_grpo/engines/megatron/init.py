"""Random start of a model from scratch, the same for every parallel layout.

Each full parameter is drawn from its own generator, seeded by (seed, name); each rank keeps its slice. So TP 2 starts
from exactly the weights of TP 1, and padding of the vocabulary does not shift anything.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

if TYPE_CHECKING:
    from ...config.schema import Recipe


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class InitStds:
    hidden: float
    embedding: float
    output: float

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> InitStds:
        init, width = recipe.policy.model_init, recipe.policy.architecture.hidden_size
        return cls(
            hidden=width**-0.5 if init.hidden_std is None else init.hidden_std,
            embedding=init.embedding_std,
            output=init.output_std,
        )

    def of(self, name: str) -> float:
        return {EMBEDDING: self.embedding, OUTPUT: self.output}.get(name, self.hidden)


@torch.no_grad()
def initialise(module: torch.nn.Module, stds: InitStds, seed: int, vocab_size: int) -> None:
    """Fill every parameter of `module` (one rank's HybridModel): matrices normal, norms one, biases zero.

    Rows of ids >= `vocab_size` are zero. Raises ValueError for a parameter it has no rule for.
    """
    layer_numbers = [layer.layer_number - 1 for layer in module.decoder.layers]
    for local_name, parameter in module.named_parameters():
        name = _global_name(local_name, layer_numbers)
        if name == OUTPUT and module.share_embeddings_and_output_weights:
            name = EMBEDDING  # the last stage of a pipeline has a copy of the tied matrix
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif parameter.dim() == 2:
            parameter.copy_(_my_slice(name, parameter, module.config, stds.of(name), seed, vocab_size))
        else:
            raise ValueError(f"no initialisation rule for {name} of shape {tuple(parameter.shape)}")


def _global_name(name: str, layer_numbers: list[int]) -> str:
    """`decoder.layers.0.x` of a pipeline stage that starts at layer 4 -> `decoder.layers.4.x`."""
    return re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{layer_numbers[int(m[1])]}", name)


def _my_slice(
    name: str, parameter: torch.Tensor, config: TransformerConfig, std: float, seed: int, vocab_size: int
) -> torch.Tensor:
    tp, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] *= tp
    if name in (EMBEDDING, OUTPUT):
        drawn = _draw(name, seed, (vocab_size, shape[1]), std)
        full = torch.nn.functional.pad(drawn, (0, 0, 0, shape[0] - vocab_size))
    else:
        full = _draw(name, seed, tuple(shape), std)
    if dim is None:
        return full
    if name.endswith("linear_fc1.weight") and config.gated_linear_unit:
        # a rank holds [its part of the gate; its part of the up projection], not one run of rows
        return torch.cat([half.chunk(tp)[rank] for half in full.chunk(2)])
    return full.chunk(tp, dim)[rank]


def _draw(name: str, seed: int, shape: tuple[int, ...], std: float) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
