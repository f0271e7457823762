"""Control calls end: with every answer, with every cause, or at their deadline with the names of the silent."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from megatron_grpo.errors import DeadlineExceeded, RunFailed, WeightSyncFailed
from megatron_grpo.ray_runtime import calls
from megatron_grpo.ray_runtime.calls import Call, Deadline, answers_within
from megatron_grpo.ray_runtime.clients import RayEngine, RayWeightTransfer
from megatron_grpo.ray_runtime.supervision import Named

DEADLINE = Deadline(seconds=0.1, setting="timeouts.refit")


class Rank:
    """An actor handle whose `pause` answers with its argument after a while, fails, or stays silent (None)."""

    def __init__(self, after_s=0.0, error=None):
        self.after_s = after_s
        self.error = error

    @property
    def pause(self):
        return self  # `handle.pause.remote(...)`

    async def remote(self, *args):
        await asyncio.sleep(3600 if self.after_s is None else self.after_s)
        if self.error:
            raise self.error
        return args


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(calls, "_GRACE_S", 0.1)


def ask(*ranks, deadline=DEADLINE):
    actors = [Named(name=f"rank {number}", handle=rank) for number, rank in enumerate(ranks)]
    asked = [Call(actor=actor, method="pause", args=(number,)) for number, actor in enumerate(actors)]
    return asyncio.run(answers_within(deadline, asked))


def test_answers_come_in_the_order_of_the_calls():
    assert ask(Rank(0.05), Rank()) == [(0,), (1,)]


def test_a_silent_rank_is_named_with_its_call_and_since_when():
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"rank 1: pause: no answer since \d\d:\d\d:\d\d") as error:
        ask(Rank(), Rank(after_s=None))
    assert "deadline timeouts.refit = 0.1 s" in str(error.value) and "rank 0" not in str(error.value)
    assert time.monotonic() - begin < 1


def test_one_failure_comes_as_it_was():
    with pytest.raises(WeightSyncFailed, match="^the weights are wrong$"):
        ask(Rank(), Rank(error=WeightSyncFailed("the weights are wrong")))


def test_a_failure_waits_for_the_cause_that_another_rank_knows():
    with pytest.raises(RunFailed) as error:
        ask(Rank(error=RunFailed("connection closed")), Rank(0.05, RunFailed("no memory")), Rank())
    assert str(error.value) == "connection closed\nno memory"


def test_a_failure_beside_a_silent_rank_tells_both():
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded) as error:
        ask(Rank(error=RunFailed("timed out")), Rank(after_s=None), deadline=Deadline(seconds=60, setting="t"))
    assert "rank 1: pause: no answer" in str(error.value) and "timed out" in str(error.value)
    assert time.monotonic() - begin < 1, "a failure must not wait for the deadline"


def test_a_transfer_joins_what_both_sides_say():
    def side(error):
        failing = Rank(error=RunFailed(error))
        return [Named(name="rank", handle=SimpleNamespace(send_weights=failing, receive_weights=failing))]

    ours, theirs = side("closed by peer"), side("generation worker 0 failed: no memory")
    transfer = RayWeightTransfer(ours, theirs, deadline=DEADLINE)
    with pytest.raises(WeightSyncFailed, match="did not reach the engine: closed by peer\ngeneration worker 0 failed"):
        asyncio.run(transfer.transfer())


def test_a_hung_engine_ends_every_control_call():
    calls_of_it = ("pause", "resume", "sleep", "wake", "set_version")
    silent = SimpleNamespace(**{name: Rank(after_s=None) for name in calls_of_it})
    engine = RayEngine([Named(name="generation worker 0", handle=silent)], colocated=True, deadline=DEADLINE)
    for call in (engine.pause, engine.resume, engine.sleep, engine.wake, lambda: engine.set_version(1)):
        with pytest.raises(DeadlineExceeded, match="generation worker 0: "):
            asyncio.run(call())
