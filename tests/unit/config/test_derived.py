"""Numbers that follow from a recipe."""

import pytest

from megatron_grpo.config.derived import buffer_capacity, derive, in_flight_limit, max_age, num_steps, updates_per_step
from megatron_grpo.layout import Layout
from tests.unit.config.recipes import DISJOINT, SYNC, recipe


def sized(prompts, age):
    return recipe({"grpo.num_prompts_per_step": prompts, "grpo.async_grpo.max_trajectory_age_steps": age})


@pytest.mark.parametrize(("prompts", "age", "groups"), [(32, 1, 64), (8, 3, 48), (1, 1, 2), (256, 8, 4096)])
def test_the_buffer_holds_two_windows_of_prompts(prompts, age, groups):
    assert buffer_capacity(sized(prompts, age)) == groups


def test_sync_runs_hold_one_step():
    assert max_age(recipe(SYNC)) == 0 and buffer_capacity(recipe(SYNC)) == 8 and in_flight_limit(recipe(SYNC)) == 8


def test_at_most_a_window_of_groups_is_in_flight():
    assert in_flight_limit(sized(8, 3)) == 32


@pytest.mark.parametrize(
    ("rows", "epochs", "limit", "steps"), [(100, 2, 1000, 24), (100, 2, 5, 5), (8, 1, 9, 1), (15, 3, 99, 3)]
)
def test_a_run_ends_with_its_steps_or_its_epochs(rows, epochs, limit, steps):
    assert num_steps(recipe({"grpo.max_num_epochs": epochs, "grpo.max_num_steps": limit}), rows) == steps


def test_updates_per_step_follow_the_global_batch():
    assert updates_per_step(recipe()) == 1
    assert updates_per_step(recipe({"policy.train_global_batch_size": 8})) == 4


def test_check_shows_every_number_with_its_formula():
    chosen = recipe(DISJOINT, {"policy.train_micro_batch_size": 4})
    numbers = {number.name: number for number in derive(chosen, Layout.from_recipe(chosen), 64)}
    assert numbers["micro-batches per update and rank"].value == 4  # 32 / (2 x 4)
    assert numbers["steps"].value == 8 and numbers["padding multiple"].value == 1
    assert all(number.formula for number in numbers.values())
    assert {number.name: number.value for number in derive(chosen, Layout.from_recipe(chosen), None)}["steps"] is None
