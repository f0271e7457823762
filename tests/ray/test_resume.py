"""Runs that are asked to stop, that are killed, and that are started again: by the same command, which is all a user
has to know. `megatron-grpo verify` proves that no prompt was skipped or trained twice.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.ray.test_end_to_end import DISJOINT, NUM_PROMPTS, RECIPES, SYNC, TINY, TP2
from tests.running import REPOSITORY, LiveRun

NUM_STEPS = 12
IN_FLIGHT = RECIPES / "grpo-sort3-1n1g-megatron_async_inflight_colocated.yaml"
NEEDED = ("policy worker 0", "generation worker 0", "collector", "replay buffer")
REPEATED = ("train/reward", "train/num_generated_tokens", "train/learning_rate", "train/max_trajectory_age")
CLOSE = ("train/loss", "train/grad_norm", "train/approx_entropy")  # the engine's batches change their last bits


def start(recipe, folder, *overrides):
    """The same command every time."""
    return LiveRun(
        recipe,
        folder / "run",
        *TINY,
        f"grpo.max_num_steps={NUM_STEPS}",
        "checkpointing.enabled=true",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
        "checkpointing.save_period=3",
        *overrides,
    )


def finish(recipe, folder, *overrides):
    with start(recipe, folder, *overrides) as run:
        assert run.wait() == 0, run.output
        run.wait_for_nothing_left()
        return run.output, run.records()


def outcome(folder):
    return json.loads((folder / "checkpoints/outcome.json").read_text())


def verify(folder):
    command = [sys.executable, "-m", "megatron_grpo", "verify", str(folder / "checkpoints"), "--json"]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    _, records = finish(SYNC, folder)
    return folder, records


def test_a_synchronous_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, uninterrupted):
    _, whole = uninterrupted
    with start(SYNC, tmp_path) as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0, run.output
        run.wait_for_nothing_left()
        assert "signal SIGTERM: the run saves and ends" in run.output
    stopped = outcome(tmp_path)
    assert (stopped["ending"], stopped["requeue"]) == ("preempted", False)
    assert 2 <= stopped["step"] < NUM_STEPS and (tmp_path / f"checkpoints/step_{stopped['step']}").is_dir()
    output, resumed = finish(SYNC, tmp_path)
    assert f"resumed after step {stopped['step']}" in output
    assert [record["step"] for record in resumed] == list(range(1, NUM_STEPS + 1))
    for name in REPEATED:
        assert [record[name] for record in resumed] == [record[name] for record in whole], name
    for name in CLOSE:
        expected = [record[name] for record in whole]
        assert [record[name] for record in resumed] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    proof = verify(tmp_path)
    assert (proof["num_attempts"], proof["num_trained"]) == (2, NUM_STEPS * NUM_PROMPTS)


def test_a_finished_run_started_again_starts_nothing(uninterrupted):
    folder, _ = uninterrupted
    assert outcome(folder)["ending"] == "finished"
    output, records = finish(SYNC, folder)
    assert "already complete" in output and "starting workers" not in output
    assert len(records) == NUM_STEPS and verify(folder)["num_attempts"] == 1


def test_other_data_and_other_group_sizes_are_refused_before_anything_starts(uninterrupted):
    folder, _ = uninterrupted
    for override, said in (("data.train.num_rows=600", "600 usable rows"), ("data.train.seed=7", "other ones")):
        with start(SYNC, folder, "grpo.max_num_steps=20", override) as run:
            assert run.wait(60) == 2, run.output
            assert said in run.output and "starting workers" not in run.output
    other_groups = ("grpo.max_num_steps=20", "grpo.num_generations_per_prompt=2")
    with start(SYNC, folder, *other_groups) as run:
        assert run.wait(60) == 2, run.output
        assert "groups of 4 answers" in run.output


@pytest.mark.long
def test_an_asynchronous_run_told_to_leave_goes_on_in_another_layout(tmp_path):
    """SIGUSR1 with requests in flight in a sleeping engine; then two tensor-parallel ranks instead of one."""
    with start(IN_FLIGHT, tmp_path) as run:
        run.wait_for_step(4)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait(60) == 0, run.output
        run.wait_for_nothing_left()
    stopped = outcome(tmp_path)
    assert (stopped["ending"], stopped["requeue"]) == ("preempted", True)
    output, records = finish(IN_FLIGHT, tmp_path, "cluster.gpus_per_node=2", TP2)
    assert f"resumed after step {stopped['step']}" in output
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert verify(tmp_path)["num_trained"] == NUM_STEPS * NUM_PROMPTS


@pytest.mark.long
def test_runs_killed_at_random_lose_and_repeat_nothing(tmp_path):
    """Twice any process without which a run cannot go on, at any time; each time the same command again."""
    seed = random.randrange(2**32)
    draw, steps = random.Random(seed), f"grpo.max_num_steps={3 * NUM_STEPS}"
    for begun in (r"step_3 is complete", r"resumed after step"):
        with start(DISJOINT, tmp_path, steps) as run:
            wait_for_output(run, begun)
            time.sleep(draw.uniform(0, 3))
            victim = draw.choice(["driver", *NEEDED])
            os.kill(run.process.pid if victim == "driver" else run.process_id(victim), signal.SIGKILL)
            assert run.wait(60) != 0, f"seed {seed}, {victim}: {run.output}"
    output, records = finish(DISJOINT, tmp_path, steps)
    assert [record["step"] for record in records] == list(range(1, 3 * NUM_STEPS + 1)), f"seed {seed}"
    assert "resumed after step" in output, f"seed {seed}"
    proof = verify(tmp_path)
    assert proof["num_trained"] == 3 * NUM_STEPS * NUM_PROMPTS and proof["oldest_age"] <= 1, f"seed {seed}: {proof}"


def wait_for_output(run, pattern, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not re.search(pattern, run.output):
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.1)
