"""The trained model as a Hugging Face architecture: what an engine that reads such names is told, and sent."""

from __future__ import annotations

from ..config.schema import Recipe
from ..conversion.architecture import Architecture, architecture_of


def hf_architecture(recipe: Recipe, vocab_size: int) -> Architecture:
    """`vocab_size` counts the tokenizer's ids, without the padding of Megatron's vocabulary."""
    shape = recipe.policy.architecture
    assert shape is not None, "only models from scratch"
    return architecture_of(shape.model_dump() | {"vocab_size": vocab_size}, "policy.model_config")
