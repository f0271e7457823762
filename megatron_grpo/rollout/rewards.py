"""Rewards from killable workers. Owns which worker is asked and how long; knows no Ray and no environment.

| task      | waits for                                    | woken by               | ends                             |
|-----------|----------------------------------------------|------------------------|----------------------------------|
| caller    | an idle worker of its environment            | a call that ended      | rewards, RewardFailed, RunFailed |
| call      | the worker's answer, its death, the deadline | whichever comes first  | worker back, replaced, a failure |
| replacing | the old process's end, the new one's start   | the factory            | worker in its lane, or a failure |
| `failure` | a worker that died although nobody killed it | its `wait_dead`        | raises RunFailed naming it       |

A call outlives a cancelled caller until it is answered or reaches its deadline: the worker is busy either way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

from ..errors import ConfigError, RewardFailed, RunFailed
from ..types import Problem
from .reward_host import RewardHost
from .reward_values import Reward, read_rewards
from .worker_lane import RewardWorker, Seat, WorkerLane

__all__ = ["Reward", "RewardHost", "RewardPool", "RewardWorker", "StartWorker"]

log = logging.getLogger(__name__)

StartWorker = Callable[[str, int], Awaitable[RewardWorker]]  # (environment name, index) -> a worker ready for calls


class RewardPool:
    """`num_workers` workers per environment; `deadline_s` (`timeouts.reward`) bounds each call."""

    def __init__(self, start_worker: StartWorker, num_workers: Mapping[str, int], *, deadline_s: float):
        self._start_worker = start_worker
        self._num_workers = dict(num_workers)
        self._deadline_s = deadline_s
        self._lanes = {env_name: WorkerLane() for env_name in num_workers}
        self._seats: dict[tuple[str, int], Seat] = {}
        self._background: set[asyncio.Task] = set()
        self._failed = asyncio.Event()
        self._error: RunFailed | None = None

    async def open(self) -> None:
        """Start every worker. Errors of the factory are raised as they are; what was started is ended."""
        places = [(env_name, index) for env_name, count in self._num_workers.items() for index in range(count)]
        try:
            await asyncio.gather(*(self._run(self._fill(env_name, index)) for env_name, index in places))
        except BaseException:
            await self.close()
            raise

    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> tuple[Reward, ...]:
        """One finite reward per response. RewardFailed: error, deadline, wrong length. RunFailed: dead worker."""
        answers = await self._call(env_name, lambda worker: worker.score(env_name, problem, responses))
        return read_rewards(answers, len(responses), f"environment {env_name!r}")

    async def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> tuple[bool, ...]:
        """Whether each response is exactly right. Raises as `score`."""
        answers = await self._call(env_name, lambda worker: worker.is_correct(env_name, problem, responses))
        if len(answers) != len(responses):
            raise RewardFailed(f"environment {env_name!r} judged {len(answers)} of {len(responses)} responses")
        return tuple(bool(answer) for answer in answers)

    async def failure(self) -> NoReturn:
        """Wait, possibly for ever, and raise RunFailed naming the first worker that died on its own."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        """End every call and every worker. Safe to repeat."""
        seats, self._seats = list(self._seats.values()), {}
        tasks = [*self._background, *(seat.death for seat in seats)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes.values():
            lane.fail(RunFailed("the reward workers were closed"))
        await asyncio.gather(*(seat.worker.kill() for seat in seats))

    async def _call[T](self, env_name: str, ask: Callable[[RewardWorker], Awaitable[T]]) -> T:
        if env_name not in self._lanes:
            raise ConfigError(f"env.{env_name} is missing; the recipe has {', '.join(self._lanes) or 'none'}")
        seat = await self._lanes[env_name].take()
        return await asyncio.shield(self._run(self._serve(seat, ask)))

    async def _serve[T](self, seat: Seat, ask: Callable[[RewardWorker], Awaitable[T]]) -> T:
        answer = asyncio.ensure_future(ask(seat.worker))
        try:
            await asyncio.wait({answer, seat.death}, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._unanswered(seat)
            return self._answered(seat, answer)
        finally:
            answer.cancel()

    def _answered[T](self, seat: Seat, answer: asyncio.Future[T]) -> T:
        error = answer.exception()
        if isinstance(error, RunFailed):
            raise self._fail(f"{seat.worker.name} died during a call: {error}") from error
        if not seat.death.done():
            self._lanes[seat.env_name].give_back(seat)
        return answer.result()

    def _unanswered(self, seat: Seat) -> RewardFailed | RunFailed:
        if seat.death.done():
            return self._fail(f"{seat.worker.name} died during a call: {seat.death.result()}")
        log.warning("%s did not answer within %g s; it is killed and replaced", seat.worker.name, self._deadline_s)
        seat.death.cancel()  # from here on its death is our doing, not a failure
        self._run(self._replace(seat))
        return RewardFailed(
            f"environment {seat.env_name!r} did not answer within timeouts.reward = {self._deadline_s:g} s "
            f"({seat.worker.name} was killed and is being replaced)"
        )

    async def _replace(self, seat: Seat) -> None:
        try:
            await seat.worker.kill()
            del self._seats[seat.env_name, seat.index]
            await self._fill(seat.env_name, seat.index)
        except Exception as error:
            raise self._fail(f"{seat.worker.name} could not be replaced: {error}") from error

    async def _fill(self, env_name: str, index: int) -> None:
        worker = await self._start_worker(env_name, index)
        death = asyncio.ensure_future(worker.wait_dead())
        seat = Seat(env_name=env_name, index=index, worker=worker, death=death)
        self._seats[env_name, index] = seat
        death.add_done_callback(lambda ended: self._on_death(seat, ended))
        self._lanes[env_name].give_back(seat)

    def _on_death(self, seat: Seat, ended: asyncio.Future[str]) -> None:
        if not ended.cancelled():
            reason = ended.exception() or ended.result()
            self._fail(f"{seat.worker.name} died: {reason}")

    def _fail(self, message: str) -> RunFailed:
        """Record the first failure, wake everyone who waits, and return it."""
        if self._error is None:
            self._error = RunFailed(message)
            log.error("%s", message)
            for lane in self._lanes.values():
                lane.fail(self._error)
            self._failed.set()
        return self._error

    def _run[T](self, work: Awaitable[T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # seen: it went to the caller, or into `failure`; a cancelled caller needs no complaint
