"""A collector with its real stream and buffer, for the tests of what it does."""

import asyncio
from contextlib import asynccontextmanager

from megatron_grpo.collector import TrajectoryCollector
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.types import Problem
from tests.fakes import SteppedRollout


class Parts:
    """A collector with its real stream and buffer; the rollout obeys the test."""

    def __init__(
        self,
        *,
        prompts=2,
        max_age=1,
        num_steps=100,
        max_failures=0,
        rows=40,
        epochs=None,
        timeout_s=30.0,
        rollout=None,
        admission=None,
        journal=None,
    ):
        self.rollout = rollout or SteppedRollout()
        row = PromptRow(token_ids=(1,), env_name="fake", problem=Problem(question="", answer=""))
        self.stream = PromptStream([row] * rows, num_prompts_per_step=prompts, seed=0, num_epochs=epochs)
        self.replay = ReplayBuffer(
            capacity=max(1, 2 * max_age) * prompts,
            num_prompts_per_step=prompts,
            max_age=max_age,
            sample_timeout_s=30,
            num_steps=num_steps,
        )
        self.collector = TrajectoryCollector(
            prompts=self.stream,
            rollout=self.rollout,
            replay=self.replay,
            num_prompts_per_step=prompts,
            max_age=max_age,
            num_steps=num_steps,
            max_failures=max_failures,
            group_timeout_s=timeout_s,
            admission=admission,
            journal=journal,
        )

    async def train(self, step):
        sampled = await self.replay.sample(step)
        await self.collector.settle([group.ordinal for group in sampled.groups], sampled.evicted, step)
        await self.collector.set_version(step + 1)

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.collector.run())
        await settled()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def settled():
    for _ in range(12):
        await asyncio.sleep(0)


def collector_test(scenario):
    def run():
        asyncio.run(asyncio.wait_for(scenario(), 20))

    run.__name__ = scenario.__name__
    return run
