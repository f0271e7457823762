"""Numbers that follow from a recipe, each with the formula that `check` prints beside it.

P = grpo.num_prompts_per_step, G = grpo.num_generations_per_prompt, A = grpo.async_grpo.max_trajectory_age_steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout
from .schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """One derived number. `value` None: it depends on something that cannot be read here."""

    name: str
    value: int | None
    formula: str


def trajectories_per_step(recipe: Recipe) -> int:
    return recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt


def updates_per_step(recipe: Recipe) -> int:
    """Optimizer calls per step."""
    return trajectories_per_step(recipe) // recipe.policy.train_global_batch_size


def max_age(recipe: Recipe) -> int:
    """The age bound A of the run; 0 when async is off (the same loop with the window {step})."""
    async_grpo = recipe.grpo.async_grpo
    return async_grpo.max_trajectory_age_steps if async_grpo.enabled else 0


def buffer_capacity(recipe: Recipe) -> int:
    """Groups the replay buffer holds: P x A x 2, or P when async is off."""
    prompts, age = recipe.grpo.num_prompts_per_step, max_age(recipe)
    return prompts * age * 2 if age else prompts


def in_flight_limit(recipe: Recipe) -> int:
    """Most groups running or buffered and not yet sampled."""
    return (max_age(recipe) + 1) * recipe.grpo.num_prompts_per_step


def steps_per_epoch(recipe: Recipe, num_rows: int) -> int:
    return num_rows // recipe.grpo.num_prompts_per_step


def num_steps(recipe: Recipe, num_rows: int) -> int:
    """min(`max_num_steps`, epochs x floor(rows / P)): 100 rows, P 32, 2 epochs, 1000 steps at most -> 6."""
    return min(recipe.grpo.max_num_steps, recipe.grpo.max_num_epochs * steps_per_epoch(recipe, num_rows))


def micro_batches_per_update(recipe: Recipe, data_parallel: int) -> int:
    """Of one data-parallel rank."""
    return recipe.policy.train_global_batch_size // (data_parallel * recipe.policy.train_micro_batch_size)


def derive(recipe: Recipe, layout: Layout, num_rows: int | None) -> tuple[Derived, ...]:
    """Everything `check` shows."""
    age = "A x 2" if max_age(recipe) else "1 (async off)"
    return (
        Derived(name="trajectories per step", value=trajectories_per_step(recipe), formula="P x G"),
        Derived(
            name="updates per step", value=updates_per_step(recipe), formula="P x G / policy.train_global_batch_size"
        ),
        Derived(
            name="micro-batches per update and rank",
            value=micro_batches_per_update(recipe, layout.train.dp),
            formula="policy.train_global_batch_size / (DP x policy.train_micro_batch_size)",
        ),
        Derived(name="buffer capacity in groups", value=buffer_capacity(recipe), formula=f"P x {age}"),
        Derived(name="groups in flight at most", value=in_flight_limit(recipe), formula="(A + 1) x P"),
        Derived(name="training rows", value=num_rows, formula="data.train"),
        Derived(
            name="steps",
            value=None if num_rows is None else num_steps(recipe, num_rows),
            formula="min(grpo.max_num_steps, grpo.max_num_epochs x floor(rows / P))",
        ),
        Derived(
            name="padding multiple",
            value=layout.train.padding_multiple,
            formula="TP under sequence parallelism, else 1; x 2 CP where the context is cut",
        ),
    )


def must_save_by_s(recipe: Recipe) -> float | None:
    """`checkpointing.checkpoint_must_save_by`, DD:HH:MM:SS, in seconds from the start of the job."""
    text = recipe.checkpointing.checkpoint_must_save_by
    if text is None:
        return None
    days, hours, minutes, seconds = map(int, text.split(":"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
