"""Rules on pipelines: the model's layers against the stages of trainer and engine."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import generation_sizes, train_sizes
from ..stages import StageEnds, stage_sizes
from .facts import Facts
from .rule_parallel import MEGATRON, generation_pp_key
from .schema import Recipe

PP = f"{MEGATRON}.pipeline_model_parallel_size"
VPP = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
ENDS = f"{MEGATRON}.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
COUNTED = f"{MEGATRON}.account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"


def layers_fill_the_stages(recipe: Recipe, facts: Facts) -> Iterator[str]:
    """Of the trainer, as the recipe splits it, and of an engine with stages of its own."""
    if facts.model is None or facts.model.num_layers is None:
        return
    trained, engine = train_sizes(recipe), generation_sizes(recipe)
    named = [(PP if trained.vpp == 1 else f"{PP} x {VPP}", trained.pp, trained.vpp)]
    if recipe.policy.generation.backend == "megatron" and engine.pp != trained.pp:
        named.append((generation_pp_key(recipe), engine.pp, 1))
    for key, pp, vpp in named:
        try:
            stage_sizes(facts.model.num_layers, pp, vpp, StageEnds.of_world(recipe, pp))
        except ValueError as error:
            yield (
                f"{key} = {pp}{f' x {vpp}' if vpp > 1 else ''} does not divide the model's {facts.model.num_layers} "
                f"layers (num_hidden_layers): {error}; set {ENDS}, or {COUNTED}, to suit"
            )


def virtual_stages_need_stages(recipe: Recipe, _: Facts) -> Iterator[str]:
    sizes = train_sizes(recipe)
    if sizes.vpp > 1 and sizes.pp == 1:
        yield f"{VPP} = {sizes.vpp} needs {PP} > 1"


def ends_are_given_in_one_way(recipe: Recipe, _: Facts) -> Iterator[str]:
    ends = StageEnds.from_recipe(recipe)
    if (ends.first or ends.last) and (ends.embedding_counts or ends.loss_counts):
        yield f"{ENDS} say how many layers the ends hold, {COUNTED} derive it: keep one of the two"
