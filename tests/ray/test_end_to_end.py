"""Whole runs through the real command line: what a user gets from each placement, layout, end and failure.

Runs are tiny (8 prompts x 4, a few steps) and shared by the tests of a module fixture: starting one costs more than
training it.
"""

import os
import signal
import time
from dataclasses import dataclass

import pytest

from tests.readme import metric_names, write_user_task
from tests.running import REPOSITORY, LiveRun

RECIPES = REPOSITORY / "recipes/llm"
DISJOINT = RECIPES / "grpo-sort3-1n2g-megatron_async.yaml"
COLOCATED = RECIPES / "grpo-sort3-1n1g-megatron_async_colocated.yaml"
SYNC = RECIPES / "grpo-sort3-1n1g-megatron_colocated.yaml"
NUM_PROMPTS = 8
TINY = (
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.logprob_batch_size=16",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "grpo.max_num_steps=3",
)
TP2 = "policy.megatron_cfg.tensor_model_parallel_size=2"
PUBLIC_NAMES = {
    "train/loss",
    "train/reward",
    "train/grad_norm",
    "train/gen_kl_error",
    "train/token_mult_prob_error",
    "train/sampling_importance_ratio",
    "train/probs_ratio",
    "train/approx_entropy",
    "train/avg_trajectory_age",
    "train/buffer_size",
}
FAMILIES = ("timing/train/", "performance/", "efficiency/")


@dataclass(frozen=True, slots=True)
class Finished:
    output: str
    steps: list  # one record of metrics.jsonl per trained step
    validations: list  # held-out accuracies in order


def run_to_end(recipe, folder, *overrides, start_folder=REPOSITORY):
    """A run that must end well and leave nothing behind."""
    with LiveRun(recipe, folder / "run", *TINY, *overrides, start_folder=start_folder) as run:
        assert run.wait() == 0, run.output
        run.wait_for_nothing_left()
        records = run.records()
        return Finished(
            output=run.output,
            steps=[record for record in records if "train/loss" in record],
            validations=[record["val:accuracy"] for record in records if "val:accuracy" in record],
        )


def column(finished, name):
    return [step[name] for step in finished.steps]


def assert_exact(step, which=""):
    """fp32: engine and trainer agree. `_fresh`: on the tokens of the step's own weights (null or absent: none)."""
    if which and step.get(f"train/gen_kl_error{which}") is None:
        return
    assert step[f"train/gen_kl_error{which}"] <= 1e-5
    assert 1 <= step[f"train/token_mult_prob_error{which}"] <= 1.001


@pytest.fixture(scope="module")
def disjoint(tmp_path_factory):
    validated = ["grpo.max_val_samples=32", "grpo.val_at_start=true", "grpo.val_at_end=true"]
    largest_age = ["grpo.max_num_steps=5", "grpo.async_grpo.max_trajectory_age_steps=2"]
    return run_to_end(DISJOINT, tmp_path_factory.mktemp("disjoint"), *validated, *largest_age)


def test_a_disjoint_run_reports_every_public_metric_in_every_step(disjoint):
    assert column(disjoint, "step") == [1, 2, 3, 4, 5]
    for step in disjoint.steps:
        assert not PUBLIC_NAMES - step.keys()
        assert all(isinstance(step[name], int | float) for name in PUBLIC_NAMES)
        for family in FAMILIES:
            assert any(name.startswith(family) for name in step), family
    assert len(disjoint.validations) == 2 and all(0 <= share <= 1 for share in disjoint.validations)


def test_every_metric_of_the_readme_is_written(disjoint):
    written = {name for step in disjoint.steps for name in step}
    told = metric_names()
    assert len(told) > 20
    missing = [name for name in told if not any(one.startswith(name.removesuffix("*")) for one in written)]
    assert missing == []


def test_a_disjoint_run_is_exact_on_fresh_groups_and_keeps_the_age_bound(disjoint):
    assert disjoint.steps[0]["train/max_trajectory_age"] == 0
    assert_exact(disjoint.steps[0])
    for step in disjoint.steps:
        assert_exact(step, "_fresh")
    assert all(0 <= age <= 2 for name in ("min", "avg", "max") for age in column(disjoint, f"train/{name}_trajectory_age"))
    assert max(column(disjoint, "train/avg_trajectory_age")) > 0


def test_a_disjoint_run_tells_its_user_each_step_and_the_outcome(disjoint):
    for text in ("workers ready after", "step 5/5", "held-out exact", "Finished 5 of 5 steps", "metrics.jsonl"):
        assert text in disjoint.output


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """The same run twice."""
    return [run_to_end(SYNC, tmp_path_factory.mktemp("sync")) for _ in range(2)]


def test_a_synchronous_run_is_always_fresh_and_exact(synchronous):
    for finished in synchronous:
        assert column(finished, "train/max_trajectory_age") == [0, 0, 0]
        for step in finished.steps:
            assert_exact(step)


def test_a_synchronous_run_repeats_itself(synchronous):
    first, second = synchronous
    for name in ("train/reward", "train/num_generated_tokens", "train/max_trajectory_age"):
        assert column(first, name) == column(second, name), name
    # Which requests share a step of the engine changes the last bits of their log-probs, and nothing else.
    for name in ("train/loss", "train/grad_norm", "train/approx_entropy"):
        assert column(first, name) == pytest.approx(column(second, name), rel=1e-4, abs=1e-6), name


LAYOUTS = {
    "TP2": (COLOCATED, ["cluster.gpus_per_node=2", TP2]),
    "DP2": (COLOCATED, ["cluster.gpus_per_node=2"]),
    "PP2+1": (RECIPES / "grpo-sort3-1n3g-megatron_async_pp2.yaml", []),
    "disjoint TP2+TP2": (
        DISJOINT,
        ["cluster.gpus_per_node=4", "policy.generation.colocated.resources.gpus_per_node=2", TP2],
    ),
}


@pytest.mark.parametrize(
    "layout", ["TP2", pytest.param("PP2+1", marks=pytest.mark.long), pytest.param("DP2", marks=pytest.mark.long), pytest.param("disjoint TP2+TP2", marks=pytest.mark.long)]
)
def test_a_layout_trains_and_begins_as_a_single_rank_does(layout, tmp_path, disjoint):
    recipe, overrides = LAYOUTS[layout]
    finished = run_to_end(recipe, tmp_path, *overrides)
    assert column(finished, "step") == [1, 2, 3]
    assert_exact(finished.steps[0])
    assert all(age <= 1 for age in column(finished, "train/max_trajectory_age"))
    # The first batch is sampled from equal weights by equal streams: only the layout differs.
    for name in ("train/reward", "train/num_generated_tokens", "train/approx_entropy", "train/loss"):
        assert finished.steps[0][name] == pytest.approx(disjoint.steps[0][name], rel=1e-4, abs=1e-6), name


def test_a_users_environment_trains_until_its_rows_are_used_up(tmp_path):
    recipe = write_user_task(tmp_path)
    num_rows = 2 * NUM_PROMPTS + 3
    finished = run_to_end(
        recipe,
        tmp_path,
        f"data.train.num_rows={num_rows}",
        "grpo.max_num_epochs=1",
        "grpo.max_num_steps=100",
        start_folder=tmp_path,
    )
    assert column(finished, "step") == [1, 2]
    assert "Finished 2 of 2 steps" in finished.output


RAISING = """
from megatron_grpo.rollout.environments import SortDigits


class Raising(SortDigits):
    def score(self, problem, response):
        raise ValueError("env boom")
"""


def test_an_environment_that_raises_ends_the_run_with_its_own_words(tmp_path):
    (tmp_path / "raising.py").write_text(RAISING)
    target = "env.sort_digits.target=raising:Raising"
    with LiveRun(COLOCATED, tmp_path / "run", *TINY, target, start_folder=tmp_path) as run:
        assert run.wait() == 1, run.output
        assert "ValueError: env boom" in run.output and "max_generation_failures" in run.output
        run.wait_for_nothing_left()


def test_a_malformed_recipe_starts_nothing(tmp_path):
    (tmp_path / "bad.yaml").write_text(f"defaults: {DISJOINT}\ngrpo: {{max_num_step: 3, seed: x}}\n")
    with LiveRun(tmp_path / "bad.yaml", tmp_path / "run") as run:
        assert run.wait(60) == 2
        assert "grpo.max_num_steps" in run.output and "grpo.seed" in run.output and "Traceback" not in run.output
        assert not run.left_over() and not run.log_dir.exists()


def test_sigterm_while_training_ends_everything(tmp_path):
    with LiveRun(DISJOINT, tmp_path / "run", *TINY, "grpo.max_num_steps=1000") as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM, run.output
        run.wait_for_nothing_left()


def test_ctrl_c_while_workers_start_ends_everything(tmp_path):
    with LiveRun(COLOCATED, tmp_path / "run", *TINY) as run:
        deadline = time.monotonic() + 120
        while not (run.log_dir / "workers" / "policy-worker-0.log").exists():
            assert run.process.poll() is None and time.monotonic() < deadline, run.output
            time.sleep(0.05)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: every process of the group
        assert run.wait(60) == 128 + signal.SIGINT, run.output
        run.wait_for_nothing_left()
