"""A signal or a deadline becomes a request to a loop that listens, and an end at once for everything else."""

import asyncio
import os
import signal

import pytest

from megatron_grpo.errors import Interrupted
from megatron_grpo.signals import until_signal
from megatron_grpo.stopping import StopRequest


def run(*, send=None, saves=True, heard=True, must_save_in_s=None):
    """What `until_signal` returns for a loop that stops when asked, or runs for a second."""
    stop = StopRequest()

    async def loop():
        stop.is_heard = heard
        if send is not None:
            os.kill(os.getpid(), send)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if heard and stop.requested:
                return 7
        return 100

    return asyncio.run(until_signal(loop(), stop, saves=saves, must_save_in_s=must_save_in_s)), stop.stop


@pytest.mark.parametrize(("number", "requeue"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)])
def test_a_loop_that_saves_is_asked_to_stop(number, requeue):
    finished, stop = run(send=number)
    assert finished == 7 and (stop.ending, stop.requeue) == ("preempted", requeue)
    assert number.name in stop.reason


def test_the_deadline_of_the_job_asks_too_and_wants_another_start():
    finished, stop = run(must_save_in_s=0.02)
    assert finished == 7 and (stop.ending, stop.requeue) == ("deadline", True)


def test_before_the_loop_listens_the_run_ends_at_once_and_well():
    finished, stop = run(send=signal.SIGTERM, heard=False)
    assert finished is None and stop.ending == "preempted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_where_nothing_is_saved_a_signal_ends_the_run_with_its_number(number):
    with pytest.raises(Interrupted) as caught:
        run(send=number, saves=False, must_save_in_s=0.0)
    assert caught.value.exit_code == 128 + number


def test_ctrl_c_saves_nothing():
    with pytest.raises(Interrupted):
        run(send=signal.SIGINT)


def test_without_a_signal_the_result_is_the_loops():
    assert run(saves=False) == (100, None)
