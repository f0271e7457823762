"""A killed part ends the run: non-zero, by name, quickly, with nothing left behind. All parts: `make acceptance`."""

import os
import signal
import time

from tests.running import REPOSITORY, LiveRun

RECIPES = REPOSITORY / "recipes/llm"
DISJOINT = RECIPES / "grpo-sort3-1n2g-megatron_async.yaml"


def kill_and_expect_its_name(tmp_path, worker, recipe=DISJOINT):
    with LiveRun(recipe, tmp_path / "run", "grpo.max_num_steps=100000", "grpo.max_num_epochs=100000") as run:
        run.wait_for_step(3)
        os.kill(run.process_id(worker), signal.SIGKILL)
        killed = time.monotonic()
        code = run.wait(60)
        seconds = time.monotonic() - killed
        assert code == 1, run.output
        assert worker in run.output.splitlines()[-1] or f"{worker} died" in run.output, run.output
        run.wait_for_nothing_left()
        return seconds


def test_a_killed_generation_worker_ends_the_run_by_name(tmp_path):
    kill_and_expect_its_name(tmp_path, "generation worker 0")
