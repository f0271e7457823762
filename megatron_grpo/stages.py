"""Which layers each stage of a pipeline holds. Pure arithmetic.

A rank holds `vpp` chunks of the model (1: one run of layers). Chunks are counted in the order a token meets them:
chunk c lies on pipeline rank c % pp.  E.g. 8 layers, pp 2, vpp 2 -> (2, 2, 2, 2): rank 0 holds layers 0, 1, 4, 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEnds:
    """What is special about the first and the last rank of a pipeline.

    `first`, `last`: their own numbers of layers, all chunks together; None: an equal share. `embedding_counts`,
    `loss_counts`: the embedding and the output layer take the place of one layer of the first and the last chunk.
    """

    first: int | None = None
    last: int | None = None
    embedding_counts: bool = False
    loss_counts: bool = False

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> StageEnds:
        megatron = recipe.policy.megatron_cfg
        return cls(
            first=megatron.num_layers_in_first_pipeline_stage,
            last=megatron.num_layers_in_last_pipeline_stage,
            embedding_counts=megatron.account_for_embedding_in_pipeline_split,
            loss_counts=megatron.account_for_loss_in_pipeline_split,
        )

    @classmethod
    def of_world(cls, recipe: Recipe, pp: int) -> StageEnds:
        """What the recipe says of the ends is meant for the trainer's number of stages; others are cut evenly."""
        return cls.from_recipe(recipe) if pp == recipe.policy.megatron_cfg.pipeline_model_parallel_size else cls()


def stage_sizes(num_layers: int, pp: int, vpp: int = 1, ends: StageEnds = StageEnds()) -> tuple[int, ...]:
    """Layers of each of the pp x vpp chunks. Raises ValueError, in words without keys, where they do not come out."""
    if pp == 1:
        return (num_layers,)
    if ends.first is None and ends.last is None:
        sizes = _even(num_layers + ends.embedding_counts + ends.loss_counts, pp * vpp, "chunks" if vpp > 1 else "stages")
        sizes[0] -= ends.embedding_counts
        sizes[-1] -= ends.loss_counts
    else:
        per_rank = _with_given_ends(num_layers, pp, ends)
        sizes = [_even(layers, vpp, "chunks of a stage")[0] for layers in per_rank] * vpp
    if min(sizes) < 1:
        raise ValueError(f"a stage is left without a layer: {sizes}")
    return tuple(sizes)


def _even(num_layers: int, parts: int, what: str) -> list[int]:
    if num_layers % parts:
        raise ValueError(f"{num_layers} layers do not divide into {parts} {what}")
    return [num_layers // parts] * parts


def _with_given_ends(num_layers: int, pp: int, ends: StageEnds) -> list[int]:
    given = [end for end in (ends.first, ends.last) if end is not None]
    left, num_middle = num_layers - sum(given), pp - len(given)
    if num_middle < 0 or left < 0 or (num_middle == 0 and left):
        raise ValueError(f"the first and last stage hold {sum(given)} of {num_layers} layers on {pp} stages")
    middle = _even(left, num_middle, f"stages, less the {sum(given)} of the ends") if num_middle else []
    return [
        *([] if ends.first is None else [ends.first]),
        *middle,
        *([] if ends.last is None else [ends.last]),
    ]
