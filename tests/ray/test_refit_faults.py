"""A rank that hangs or dies in the middle of a real run: it ends within the deadlines of a weight update, by name."""

import os
import signal
import time

import pytest

from tests.running import REPOSITORY, LiveRun

RECIPES = REPOSITORY / "recipes/llm"
IN_FLIGHT = RECIPES / "grpo-sort3-1n2g-megatron_async_inflight.yaml"
RESHARDED = RECIPES / "grpo-sort3-1n2g-megatron_async_colocated_tp2to1.yaml"
ENDLESS = ("grpo.max_num_steps=100000", "grpo.max_num_epochs=100000", "grpo.val_period=0", "grpo.val_at_start=false")
REFIT_S = 5


def end_after(tmp_path, recipe, worker, number, *overrides):
    """Send a signal to a worker of a run under way: seconds until the run ended non-zero, and its output."""
    with LiveRun(recipe, tmp_path / "run", *ENDLESS, f"timeouts.refit={REFIT_S}", *overrides) as run:
        run.wait_for_step(2)
        os.kill(run.process_id(worker), number)
        begin = time.monotonic()
        code = run.wait(60)
        seconds = time.monotonic() - begin
        assert code == 1, run.output
        run.wait_for_nothing_left()
        return seconds, run.output


@pytest.mark.long
def test_a_hung_receiver_ends_the_run_within_the_refit_deadline(tmp_path):
    seconds, output = end_after(tmp_path, IN_FLIGHT, "generation worker 0", signal.SIGSTOP)
    assert "generation worker 0: " in output and "timeouts.refit = 5 s" in output, output
    # the deadline, the grace of the ranks, that of the supervisor, the end of Ray
    assert seconds < REFIT_S + 25


@pytest.mark.long
def test_a_rank_killed_between_reshardings_ends_the_run_by_name(tmp_path):
    seconds, output = end_after(tmp_path, RESHARDED, "policy worker 1", signal.SIGKILL)
    assert "policy worker 1 died" in output, output
    assert seconds < 25
