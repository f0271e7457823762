"""The rules across keys. Each names its keys, their values and the remedy; `RULES` is the list.

A rule takes a recipe whose types and ranges are already right, and the facts of its model and data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..layout import place
from . import rule_batch, rule_loss, rule_modes, rule_parallel, rule_pipeline, rule_vllm
from .facts import Facts
from .schema import Recipe

Rule = Callable[[Recipe, Facts], Iterator[str]]

RULES: tuple[Rule, ...] = (
    rule_modes.megatron_trains,
    rule_modes.backend_is_installed,
    rule_modes.training_samples_are_not_filtered,
    rule_vllm.vllm_has_its_own_gpus,
    rule_vllm.vllm_async_needs_its_async_engine,
    rule_vllm.vllm_experts_follow_its_tensor_parallelism,
    rule_vllm.vllm_replicas_stay_on_a_node,
    rule_modes.kv_cache_mode_is_known,
    rule_modes.kv_cache_mode_agrees_with_recompute,
    rule_modes.async_corrects_importance,
    rule_modes.scratch_model_is_described,
    rule_modes.transformer_engine_needs_cuda,
    rule_loss.truncation_ratio_has_a_type,
    rule_loss.truncation_type_has_a_ratio,
    rule_loss.truncation_range_is_ordered,
    rule_loss.dual_clip_is_above_one,
    rule_loss.overlong_buffer_fits_the_response,
    rule_loss.reward_source_range_is_ordered,
    rule_loss.warm_up_ends_before_the_decay,
    rule_loss.decay_does_not_raise_the_rate,
    rule_batch.step_splits_into_updates,
    rule_batch.update_splits_over_ranks,
    rule_batch.data_fills_a_step,
    rule_batch.completion_fits_the_sequence,
    rule_batch.engine_holds_the_sequence,
    rule_batch.engine_token_limit_is_rounded,
    rule_batch.training_data_is_named,
    rule_batch.data_sources_are_whole,
    rule_batch.environments_exist,
    rule_parallel.one_node_leaves_gpus_for_training,
    rule_parallel.several_nodes_leave_nodes_for_training,
    rule_parallel.model_parallel_divides_training_gpus,
    rule_parallel.expert_parallel_divides_training_gpus,
    rule_parallel.generation_parallel_divides_its_gpus,
    rule_parallel.tensor_parallel_divides_heads,
    rule_parallel.tensor_parallel_divides_kv_heads,
    rule_parallel.inline_heads_form_groups,
    rule_parallel.rotary_heads_are_even,
    rule_parallel.expert_parallel_divides_experts,
    rule_pipeline.layers_fill_the_stages,
    rule_pipeline.virtual_stages_need_stages,
    rule_pipeline.ends_are_given_in_one_way,
    rule_parallel.sequence_parallel_needs_tensor_parallel,
    rule_parallel.experts_under_tensor_parallel_need_sequence_parallel,
    rule_parallel.segments_tile_the_cluster,
)


def broken_rules(recipe: Recipe, facts: Facts) -> list[str]:
    """Every problem of every rule."""
    return [problem for rule in RULES for problem in rule(recipe, facts)]


def cautions(recipe: Recipe) -> Iterator[str]:
    """What runs, but is probably not meant."""
    idle = sum(placement.role == "idle" for placement in place(recipe))
    if idle:
        yield (
            f"policy.generation.colocated.resources.gpus_per_node: {idle} GPUs of the generation nodes stay idle "
            f"(cluster.gpus_per_node is {recipe.cluster.gpus_per_node})"
        )
    if recipe.grpo.num_generations_per_prompt == 1:
        yield "grpo.num_generations_per_prompt is 1: every advantage is 0 and nothing is learned"
