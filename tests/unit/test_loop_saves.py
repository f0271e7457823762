"""When the loop saves, and how it ends when it is asked to stop."""

import asyncio

import pytest

from megatron_grpo.stopping import Stop, Stopped, StopRequest
from tests.unit.test_loop import Recorder, train

STOP = Stop(ending="preempted", requeue=True, reason="signal SIGUSR1")


class SavesEvery:
    """A `Checkpoints` that writes what is asked of it into the recorder's calls."""

    def __init__(self, recorder, period, last_saved=0):
        self._calls = recorder.calls
        self._period = period
        self._last_saved = last_saved

    def due(self, finished):
        return finished % self._period == 0

    def lacks(self, finished):
        return finished > self._last_saved

    async def save(self, finished):
        self._calls.append(f"save {finished}")
        self._last_saved = finished

    def validated(self, finished, result):
        self._calls.append(f"metric of {finished}: {result.accuracy}")

    async def poll(self):
        self._calls.append("poll")

    async def finish(self):
        self._calls.append("finish")


class StopsAt(Recorder):
    """Asks to stop when `call` is made; a `sample` at which it stops never ends."""

    def __init__(self, call, **options):
        super().__init__(**options)
        self.stop = StopRequest()
        self._call = call

    async def sample(self, target_step):
        if self._call == f"sample {target_step}":
            self.stop.request(STOP)
            await asyncio.Event().wait()
        return await super().sample(target_step)

    async def train(self, updates):
        if self._call == "train":
            self.stop.request(STOP)
        return await super().train(updates)


def test_a_save_comes_before_the_weights_are_published_and_learns_the_validation_that_follows():
    recorder = Recorder()
    train(recorder, num_steps=2, validation_due=lambda finished: finished == 2, checkpoints=SavesEvery(recorder, 2))
    assert recorder.calls[recorder.calls.index("settle 1 evicted [7]") :] == [
        "settle 1 evicted [7]",
        "save 2",
        "publish 2",
        "report 1",
        "pause",
        "evaluate",
        "validated 2",
        "resume",
        "metric of 2: 0.5",
        "poll",
        "finish",
        "collector stopped",
    ]
    assert "save 1" not in recorder.calls


def test_a_stop_while_the_loop_waits_for_groups_saves_with_the_engine_at_rest():
    recorder = StopsAt("sample 1")
    assert train(recorder, num_steps=9, checkpoints=SavesEvery(recorder, 5), stop=recorder.stop) == 1
    assert recorder.calls[-6:] == ["poll", "window opens", "save 1", "window closes", "finish", "collector stopped"]


def test_a_stop_while_a_step_trains_saves_that_step_and_publishes_nothing():
    recorder = StopsAt("train")
    checkpoints = SavesEvery(recorder, 5)
    finished = train(
        recorder, num_steps=9, validation_due=lambda finished: finished == 1, checkpoints=checkpoints, stop=recorder.stop
    )
    assert finished == 1
    assert recorder.calls[-5:] == ["save 1", "report 0", "poll", "finish", "collector stopped"]


def test_a_step_that_is_due_anyway_is_saved_once_when_the_run_stops():
    recorder = StopsAt("train")
    train(recorder, num_steps=9, checkpoints=SavesEvery(recorder, 1), stop=recorder.stop)
    assert recorder.calls.count("save 1") == 1


def test_nothing_is_saved_when_nothing_was_trained():
    recorder = StopsAt("sample 4")
    checkpoints = SavesEvery(recorder, 5, last_saved=4)
    assert train(recorder, start_step=4, num_steps=9, checkpoints=checkpoints, stop=recorder.stop) == 4
    assert not any(call.startswith("save") for call in recorder.calls)


def test_the_end_of_the_data_is_saved():
    recorder = Recorder(data_ends_at=1)
    assert train(recorder, num_steps=9, checkpoints=SavesEvery(recorder, 5)) == 1
    assert "save 1" in recorder.calls


def test_a_resumed_run_is_not_validated_before_its_first_step():
    recorder = Recorder()
    train(recorder, start_step=4, num_steps=5, validation_due=lambda finished: finished == 4)
    assert recorder.calls[0] == "publish 4" and "evaluate" not in recorder.calls


# The request


def test_the_first_request_stays():
    stop = StopRequest()
    stop.request(STOP)
    stop.request(Stop(ending="deadline", requeue=True, reason="later"))
    assert stop.stop is STOP


def test_a_wait_that_is_over_is_not_given_up():
    async def both():
        stop = StopRequest()
        done = asyncio.get_running_loop().create_future()
        done.set_result(3)
        stop.request(STOP)
        return await stop.interrupts(done)

    assert asyncio.run(both()) == 3


def test_a_wait_that_is_given_up_is_cancelled_and_its_own_error_passes():
    async def given_up():
        stop, waiting = StopRequest(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(stop.request, STOP)
        with pytest.raises(Stopped):
            await stop.interrupts(waiting)
        return waiting.cancelled()

    async def fails():
        raise ValueError("its own")

    async def passes():
        with pytest.raises(ValueError, match="its own"):
            await StopRequest().interrupts(fails())

    assert asyncio.run(given_up())
    asyncio.run(passes())
