"""Reward workers as Ray actors: user code in a process of its own, killed at the deadline and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from ..errors import RunFailed
from ..rollout.reward_host import RewardHost
from ..rollout.rewards import RewardWorker, StartWorker
from ..types import Problem
from .actors import Held, log_to_file
from .cluster import worker_options
from .supervision import Named, answer


@ray.remote(max_concurrency=4)
class RewardWorkerActor(Held):
    def __init__(self, name: str, blocks: Mapping[str, Mapping[str, Any]], log_dir: str):
        log_to_file(log_dir, name)
        self._host = RewardHost(blocks)

    async def prepare(self, env_name: str) -> None:
        await asyncio.to_thread(self._host.prepare, env_name)

    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> list[float | None]:
        return await asyncio.to_thread(self._host.score, env_name, problem, responses)

    async def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> list[bool]:
        return await asyncio.to_thread(self._host.is_correct, env_name, problem, responses)


class RayRewardWorker:
    """`RewardWorker` over the actor."""

    def __init__(self, actor: Named):
        self._actor = actor
        self.name = actor.name

    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> Sequence[object]:
        return await answer(self._actor, self._actor.handle.score.remote(env_name, problem, responses))

    async def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> Sequence[bool]:
        return await answer(self._actor, self._actor.handle.is_correct.remote(env_name, problem, responses))

    async def wait_dead(self) -> str:
        try:
            await answer(self._actor, self._actor.handle.hold.remote())
        except RunFailed as error:
            return str(error)
        return f"{self.name} ended"

    async def kill(self) -> None:
        ray.kill(self._actor.handle, no_restart=True)
        try:
            await self._actor.handle.hold.remote()
        except RayActorError:
            return


def reward_worker_factory(blocks: Mapping[str, Mapping[str, Any]], log_dir: str) -> StartWorker:
    """Starts a worker and lets it build its environment, so that imports do not count against the first deadline."""

    async def start(env_name: str, index: int) -> RewardWorker:
        name = f"reward worker {env_name}/{index}"
        options = worker_options(None, 0)
        actor = Named(name=name, handle=RewardWorkerActor.options(**options).remote(name, blocks, log_dir))
        await answer(actor, actor.handle.prepare.remote(env_name))
        return RayRewardWorker(actor)

    return start
