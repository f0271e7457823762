"""Rules on batch arithmetic, lengths and data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from ..layout import train_gpus, train_sizes
from .dependent import BUILT_IN_ENVIRONMENTS
from .derived import trajectories_per_step
from .facts import Facts
from .schema import DataSource, Recipe

DATA_SUFFIXES = (".jsonl", ".parquet")
ENGINE_TOKEN_ROUNDING = 64  # Megatron's dynamic context rounds token counts up to this; other limits break it


def step_splits_into_updates(recipe: Recipe, _: Facts) -> Iterator[str]:
    rows, update = trajectories_per_step(recipe), recipe.policy.train_global_batch_size
    if rows % update:
        yield (
            f"grpo.num_prompts_per_step x grpo.num_generations_per_prompt = {_p_times_g(recipe)} is not divisible by "
            f"policy.train_global_batch_size = {update}"
        )


def update_splits_over_ranks(recipe: Recipe, _: Facts) -> Iterator[str]:
    gpus, sizes = train_gpus(recipe), train_sizes(recipe)
    if not gpus or gpus % sizes.model_parallel:
        return
    data_parallel, micro = gpus // sizes.model_parallel, recipe.policy.train_micro_batch_size
    update = recipe.policy.train_global_batch_size
    if update % (data_parallel * micro):
        yield (
            f"policy.train_global_batch_size = {update} is not divisible by data-parallel size x "
            f"policy.train_micro_batch_size = {data_parallel} x {micro} = {data_parallel * micro} "
            f"(grpo.num_prompts_per_step x grpo.num_generations_per_prompt = {_p_times_g(recipe)})"
        )


def _p_times_g(recipe: Recipe) -> str:
    grpo = recipe.grpo
    total = trajectories_per_step(recipe)
    return f"{grpo.num_prompts_per_step} x {grpo.num_generations_per_prompt} = {total}"


def data_fills_a_step(recipe: Recipe, facts: Facts) -> Iterator[str]:
    prompts = recipe.grpo.num_prompts_per_step
    if facts.train_rows is not None and facts.train_rows < prompts:
        yield f"data.train has {facts.train_rows} rows, fewer than grpo.num_prompts_per_step = {prompts}: no step fills"


def completion_fits_the_sequence(recipe: Recipe, _: Facts) -> Iterator[str]:
    """Equal is allowed: a completion then gets what its prompt leaves."""
    new, total = recipe.policy.generation.max_new_tokens, recipe.policy.max_total_sequence_length
    if new > total:
        yield f"policy.generation.max_new_tokens = {new} exceeds policy.max_total_sequence_length = {total}"


def engine_holds_the_sequence(recipe: Recipe, _: Facts) -> Iterator[str]:
    generation, total = recipe.policy.generation, recipe.policy.max_total_sequence_length
    sections = {"megatron": generation.mcore_generation_config, "vllm": generation.vllm_cfg}
    names = {"megatron": "mcore_generation_config", "vllm": "vllm_cfg"}
    section = sections.get(generation.backend)
    if section is not None and section.max_model_len is not None and section.max_model_len < total:
        yield (
            f"policy.generation.{names[generation.backend]}.max_model_len = {section.max_model_len} is below "
            f"policy.max_total_sequence_length = {total}: leave it out"
        )


def engine_token_limit_is_rounded(recipe: Recipe, _: Facts) -> Iterator[str]:
    limit = recipe.policy.generation.mcore_generation_config.max_tokens
    if recipe.policy.generation.backend == "megatron" and limit % ENGINE_TOKEN_ROUNDING:
        yield (
            f"policy.generation.mcore_generation_config.max_tokens = {limit} must be a multiple of "
            f"{ENGINE_TOKEN_ROUNDING}"
        )


def training_data_is_named(recipe: Recipe, _: Facts) -> Iterator[str]:
    if recipe.data.train is None:
        yield "data.train must name the prompts: a `path`, or an `env` with `num_rows`"


def data_sources_are_whole(recipe: Recipe, _: Facts) -> Iterator[str]:
    """Each source names a file or a generator, in a form that can be read."""
    for key, source in _sources(recipe):
        if source.path is None and source.dataset_name is None:
            if source.env is None:
                yield f"{key} must name the prompts: a `path`, or an `env` with `num_rows`"
            elif source.num_rows is None:
                yield f"{key}.num_rows must say how many prompts the environment {source.env!r} generates"
        elif source.path is not None and source.dataset_name is not None:
            yield f"{key}.path and {key}.dataset_name both name the data; keep one"
        elif source.path is not None and PurePath(source.path).suffix not in DATA_SUFFIXES:
            yield f"{key}.path: {source.path} must end in {' or '.join(DATA_SUFFIXES)}"


def environments_exist(recipe: Recipe, _: Facts) -> Iterator[str]:
    for key, source in _sources(recipe):
        name = source.env
        if name is None or name in BUILT_IN_ENVIRONMENTS:  # their target is known
            continue
        if name not in recipe.env:
            known = ", ".join(dict.fromkeys((*BUILT_IN_ENVIRONMENTS, *recipe.env)))
            yield f"{key}.env: no environment {name!r}; known: {known}; add env.{name}.target"
        elif recipe.env[name].target is None:
            yield f"env.{name}.target must name its class as 'module:Class' ({key}.env uses it)"


def _sources(recipe: Recipe) -> Iterator[tuple[str, DataSource]]:
    if recipe.data.train is not None:
        yield "data.train", recipe.data.train
    if recipe.data.validation is not None:
        yield "data.validation", recipe.data.validation
