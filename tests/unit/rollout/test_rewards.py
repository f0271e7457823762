"""The pool of reward workers: errors, deadlines, deaths, order and cancellation."""

import asyncio
import pickle
import sys

import numpy as np
import pytest

from megatron_grpo.errors import ConfigError, RewardFailed, RunFailed
from megatron_grpo.rollout.rewards import Reward, RewardHost, RewardPool
from megatron_grpo.types import Problem
from tests.fakes import HostedRewardWorker

BLOCK = {"target": "tests.fakes:FixedEnvironment", "num_workers": 1}
PROBLEM = Problem(question="what?", answer="1")


class Workers:
    """Starts workers for a pool and keeps them by name."""

    def __init__(self):
        self.started = {}
        self.start_error = None

    async def start(self, env_name, index):
        if self.start_error is not None:
            raise self.start_error
        name = f"reward worker {env_name}/{index}#{len(self.started)}"
        self.started[name] = HostedRewardWorker(name, RewardHost({"one": BLOCK, "two": BLOCK}))
        return self.started[name]

    @property
    def all(self):
        return list(self.started.values())


def with_pool(scenario, num_workers=None, deadline_s=30.0):
    async def run():
        workers = Workers()
        pool = RewardPool(workers.start, num_workers or {"one": 1}, deadline_s=deadline_s)
        await pool.open()
        try:
            return await asyncio.wait_for(scenario(pool, workers), 10)
        finally:
            await pool.close()
            assert all(worker.was_killed for worker in workers.all)

    return asyncio.run(run())


async def turns(num=10):
    for _ in range(num):
        await asyncio.sleep(0)


def test_rewards_come_back_in_order():
    async def scenario(pool, workers):
        return await pool.score("one", PROBLEM, ["0.5", "1", "nan"])

    assert with_pool(scenario) == (Reward(value=0.5), Reward(value=1.0), Reward(value=0.0, unusable="nan"))


def test_exactness_is_asked_separately():
    async def scenario(pool, workers):
        return await pool.is_correct("one", PROBLEM, ["1", "2"])

    assert with_pool(scenario) == (True, False)


def test_an_environments_error_carries_its_text_and_traceback_and_the_worker_goes_on():
    async def scenario(pool, workers):
        with pytest.raises(RewardFailed) as failed:
            await pool.score("one", PROBLEM, ["1", "raise env boom"])
        assert await pool.score("one", PROBLEM, ["1"]) == (Reward(value=1.0),)
        return str(failed.value), len(workers.all)

    message, num_started = with_pool(scenario)
    assert "ValueError" in message and "env boom" in message and "in score" in message and "what?" in message
    assert num_started == 1


def test_a_call_beyond_the_deadline_fails_and_its_worker_is_replaced():
    async def scenario(pool, workers):
        workers.all[0].hang = True
        with pytest.raises(RewardFailed, match="timeouts.reward = 0.05"):
            await pool.score("one", PROBLEM, ["1"])
        assert await pool.score("one", PROBLEM, ["1"]) == (Reward(value=1.0),)
        assert [worker.was_killed for worker in workers.all] == [True, False]

    with_pool(scenario, deadline_s=0.05)


def test_a_hanging_environment_does_not_hold_up_another():
    async def scenario(pool, workers):
        workers.all[0].hang = True
        blocked = asyncio.ensure_future(pool.score("one", PROBLEM, ["1"]))
        assert await pool.score("two", PROBLEM, ["1"]) == (Reward(value=1.0),)
        assert not blocked.done()
        blocked.cancel()

    with_pool(scenario, {"one": 1, "two": 1})


def test_a_hanging_worker_does_not_hold_up_its_neighbour():
    async def scenario(pool, workers):
        workers.all[0].hang = True
        blocked = asyncio.ensure_future(pool.score("one", PROBLEM, ["1"]))
        await turns()
        answers = await asyncio.gather(*(pool.score("one", PROBLEM, [str(number)]) for number in range(5)))
        blocked.cancel()
        return [reward.value for (reward,) in answers]

    assert with_pool(scenario, {"one": 2}) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_that_dies_is_reported_by_name_and_ends_every_wait(busy):
    async def scenario(pool, workers):
        worker = workers.all[0]
        worker.hang = True
        calls = [asyncio.ensure_future(pool.score("one", PROBLEM, ["1"])) for _ in range(3 if busy else 0)]
        watch = asyncio.ensure_future(pool.failure())
        await turns()
        worker.die("exit code 137")
        errors = await asyncio.gather(watch, *calls, return_exceptions=True)
        with pytest.raises(RunFailed):
            await pool.score("one", PROBLEM, ["1"])
        return errors

    errors = with_pool(scenario)
    assert len(errors) == (4 if busy else 1)
    assert all(isinstance(error, RunFailed) for error in errors)
    assert all("reward worker one/0#0" in str(error) and "137" in str(error) for error in errors)


def test_a_death_that_only_the_call_notices_is_a_failure_too():
    async def scenario(pool, workers):
        async def gone(env_name, problem, responses):
            raise RunFailed("the process is gone")

        workers.all[0].score = gone
        with pytest.raises(RunFailed, match="reward worker one/0#0 died during a call: the process is gone"):
            await pool.score("one", PROBLEM, ["1"])
        with pytest.raises(RunFailed):
            await pool.failure()

    with_pool(scenario)


def test_a_worker_that_cannot_be_replaced_is_a_failure():
    async def scenario(pool, workers):
        workers.all[0].hang = True
        workers.start_error = OSError("no memory")
        with pytest.raises(RewardFailed):
            await pool.score("one", PROBLEM, ["1"])
        with pytest.raises(RunFailed, match="could not be replaced: no memory"):
            await pool.score("one", PROBLEM, ["1"])
        with pytest.raises(RunFailed):
            await pool.failure()

    with_pool(scenario, deadline_s=0.05)


def test_a_cancelled_call_gives_its_worker_back_when_it_ends():
    async def scenario(pool, workers):
        call = asyncio.ensure_future(pool.score("one", PROBLEM, ["1"]))
        await asyncio.sleep(0)
        call.cancel()
        assert await pool.score("one", PROBLEM, ["2"]) == (Reward(value=2.0),)
        return len(workers.all)

    assert with_pool(scenario) == 1


def test_random_cancellations_lose_no_worker():
    async def scenario(pool, workers):
        rng = np.random.default_rng(0)
        for _ in range(50):
            calls = [asyncio.ensure_future(pool.score("one", PROBLEM, ["1"])) for _ in range(8)]
            for call in calls:
                await turns(int(rng.integers(0, 3)))
                if rng.random() < 0.5:
                    call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return await asyncio.gather(*(pool.score("one", PROBLEM, ["1"]) for _ in range(6)))

    assert len(with_pool(scenario, {"one": 3})) == 6


def test_a_worker_that_answers_with_the_wrong_number_of_rewards_fails_the_call():
    async def scenario(pool, workers):
        async def short(env_name, problem, responses):
            return [True]

        workers.all[0].score = workers.all[0].is_correct = short
        with pytest.raises(RewardFailed, match="1 rewards for 2"):
            await pool.score("one", PROBLEM, ["1", "2"])
        with pytest.raises(RewardFailed, match="1 of 2"):
            await pool.is_correct("one", PROBLEM, ["1", "2"])

    with_pool(scenario)


def test_an_unknown_environment_is_named():
    async def scenario(pool, workers):
        with pytest.raises(ConfigError, match="env.three"):
            await pool.score("three", PROBLEM, ["1"])

    with_pool(scenario)


def test_a_pool_that_cannot_start_ends_what_it_started():
    async def run():
        workers = Workers()

        async def start(env_name, index):
            if index == 1:
                raise ConfigError("env.one.target cannot be imported")
            return await workers.start(env_name, index)

        pool = RewardPool(start, {"one": 2}, deadline_s=1)
        with pytest.raises(ConfigError, match="cannot be imported"):
            await pool.open()
        assert [worker.was_killed for worker in workers.all] == [True]

    asyncio.run(run())


def test_closing_wakes_whoever_waits():
    async def run():
        workers = Workers()
        pool = RewardPool(workers.start, {"one": 1}, deadline_s=30)
        await pool.open()
        workers.all[0].hang = True
        calls = [asyncio.ensure_future(pool.score("one", PROBLEM, ["1"])) for _ in range(2)]
        await turns()
        await pool.close()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)

    running, waiting = asyncio.run(run())
    assert isinstance(running, asyncio.CancelledError | RunFailed) and isinstance(waiting, RunFailed)


def test_the_host_builds_an_environment_once_and_names_a_missing_block():
    host = RewardHost({"one": BLOCK, "broken": {"target": "no_such_module_9:Task"}})
    host.prepare("one")
    assert host.score("one", PROBLEM, ["1", "array([[2.0]])"]) == [1.0, 2.0]
    with pytest.raises(ConfigError, match="env.broken.target"):
        host.prepare("broken")
    with pytest.raises(ConfigError, match="env.absent"):
        host.score("absent", PROBLEM, ["1"])


@pytest.mark.parametrize("response", ["'text'", "[1.0, 2.0]", "raise boom", "no_such_name"])
def test_the_hosts_errors_cross_a_process_boundary(response):
    with pytest.raises(RewardFailed) as failed:
        RewardHost({"one": BLOCK}).score("one", PROBLEM, [response])
    assert "what?" in str(pickle.loads(pickle.dumps(failed.value)))


def test_an_environment_that_calls_exit_fails_its_group_only(monkeypatch):
    from tests.fakes import FixedEnvironment

    monkeypatch.setattr(FixedEnvironment, "score", lambda self, problem, response: sys.exit(3))
    with pytest.raises(RewardFailed, match="SystemExit"):
        RewardHost({"one": BLOCK}).score("one", PROBLEM, ["1"])
