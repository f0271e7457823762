"""Microseconds per group through collector and buffer, at 1, 64 and 1024 groups in flight.

    python -m benchmarks.buffer [--groups 20000] [--ray]

Rollouts cost nothing here: what is left is choosing a target, one asyncio task per group, the buffer, sampling,
prompt accounting. The figure must not grow with the number in flight; neither must that of the buffer alone, nor that
of producers that wait because it is full.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.collector import TrajectoryCollector
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.interfaces import Producer
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.types import Problem, Prompt, TrajectoryGroup

IN_FLIGHT = (1, 64, 1024)
ROW = PromptRow(token_ids=(1, 2, 3), env_name="none", problem=Problem(question="", answer=""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """P and A for a number of groups in flight: (A+1) x P; a single one is synchronous."""

    num_prompts: int
    max_age: int
    num_steps: int

    @classmethod
    def of(cls, in_flight: int, num_groups: int) -> Size:
        max_age = 0 if in_flight == 1 else 1
        num_prompts = in_flight // (max_age + 1)
        return cls(num_prompts=num_prompts, max_age=max_age, num_steps=max(4, num_groups // num_prompts))

    @property
    def num_groups(self) -> int:
        return self.num_steps * self.num_prompts


class InstantRollout:
    """Answers after one turn of the event loop."""

    num_generating = 0

    async def run_group(self, prompt: Prompt, *, target_step: int, generation_version: int) -> TrajectoryGroup:
        await asyncio.sleep(0)
        return make_group(prompt, target_step, generation_version)

    async def wait_drained(self) -> None:
        return None


def make_group(prompt: Prompt, target_step: int, generation_version: int) -> TrajectoryGroup:
    return TrajectoryGroup(
        ordinal=prompt.ordinal,
        prompt=prompt,
        trajectories=(),
        generation_version=generation_version,
        target_step=target_step,
    )


def build_buffer(size: Size, capacity: int | None = None) -> ReplayBuffer:
    return ReplayBuffer(
        capacity=capacity or max(1, 2 * size.max_age) * size.num_prompts,
        num_prompts_per_step=size.num_prompts,
        max_age=size.max_age,
        sample_timeout_s=600,
        num_steps=size.num_steps,
    )


def build_collector(size: Size, replay: Producer) -> TrajectoryCollector:
    return TrajectoryCollector(
        prompts=PromptStream([ROW] * 4096, num_prompts_per_step=size.num_prompts, seed=0, num_epochs=None),
        rollout=InstantRollout(),
        replay=replay,
        num_prompts_per_step=size.num_prompts,
        max_age=size.max_age,
        num_steps=size.num_steps,
        max_failures=0,
        group_timeout_s=600,
    )


async def collector_and_buffer(size: Size) -> float:
    """CPU seconds for all groups of a run in one process (nothing here waits, so other load does not count)."""
    replay = build_buffer(size)
    collector = build_collector(size, replay)
    began = time.process_time()
    collecting = asyncio.create_task(collector.run())
    for step in range(size.num_steps):
        sampled = await replay.sample(step)
        await collector.settle([group.ordinal for group in sampled.groups], sampled.evicted, step)
        await collector.set_version(step + 1)
    seconds = time.process_time() - began
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    return seconds


async def waiting_producers(size: Size) -> float:
    """CPU seconds with a buffer that is always full: all groups but a few wait inside `add`."""
    replay = build_buffer(size, capacity=1)
    prompt = Prompt(ordinal=0, token_ids=(), env_name="none", problem=ROW.problem)
    began = time.process_time()
    for first in range(0, size.num_steps, size.max_age + 1):
        steps = range(first, min(first + size.max_age + 1, size.num_steps))
        groups = [make_group(prompt, step, first) for step in reversed(steps) for _ in range(size.num_prompts)]
        producers = [asyncio.create_task(replay.add(group)) for group in groups]
        for step in steps:
            await replay.sample(step)
        await asyncio.gather(*producers)
    return time.process_time() - began


def in_process(num_groups: int) -> None:
    print("groups in flight   collector + buffer   producers waiting   (CPU microseconds per group, best of 3)")
    for in_flight in IN_FLIGHT:
        size = Size.of(in_flight, num_groups)
        columns = []
        for measure in (collector_and_buffer, waiting_producers):
            columns.append(min(asyncio.run(measure(size)) for _ in range(3)) / size.num_groups * 1e6)
        print(f"{in_flight:16d}   {columns[0]:18.1f}   {columns[1]:17.1f}")


def through_ray(num_groups: int) -> None:
    """The same with the buffer in its actor, the collector in another, and the loop here: wall time."""
    from megatron_grpo.ray_runtime.cluster import ray_cluster

    print("groups in flight   through Ray   (wall microseconds per group, best of 3)")
    with ray_cluster():
        for in_flight in IN_FLIGHT:
            size = Size.of(in_flight, num_groups)
            seconds = min(asyncio.run(actors(size)) for _ in range(3))
            print(f"{in_flight:16d}   {seconds / size.num_groups * 1e6:11.1f}")


async def actors(size: Size) -> float:
    """Wall seconds for all groups of a run, start-up of the actors not counted."""
    import ray

    from megatron_grpo.ray_runtime.actors import BufferSettings, ReplayBufferActor
    from megatron_grpo.ray_runtime.clients import RayReplay
    from megatron_grpo.ray_runtime.supervision import Named

    settings = BufferSettings(
        capacity=max(1, 2 * size.max_age) * size.num_prompts,
        num_prompts_per_step=size.num_prompts,
        max_age=size.max_age,
        num_steps=size.num_steps,
        sample_timeout_s=600,
    )
    with tempfile.TemporaryDirectory() as log_dir:
        buffer = Named(name="replay buffer", handle=ReplayBufferActor.remote(settings, log_dir))
        collector = ray.remote(num_cpus=0, max_concurrency=100)(InstantCollector).remote(size, buffer)
        replay = RayReplay(buffer)
        await buffer.handle.process_id.remote()
        await collector.set_version.remote(0)
        began = time.perf_counter()
        running = collector.run.remote()
        for step in range(size.num_steps):
            sampled = await replay.sample(step)
            await collector.settle.remote([group.ordinal for group in sampled.groups], sampled.evicted, step)
            await collector.set_version.remote(step + 1)
        seconds = time.perf_counter() - began
        for actor in (collector, buffer.handle):
            ray.kill(actor)
        del running
        return seconds


class InstantCollector:
    """The real collector over `InstantRollout`, as an actor."""

    def __init__(self, size: Size, buffer: Any):
        from megatron_grpo.ray_runtime.clients import RayReplay

        self._collector = build_collector(size, RayReplay(buffer))

    async def run(self) -> None:
        await self._collector.run()

    async def settle(self, trained: Sequence[int], evicted: Sequence[int], step: int) -> None:
        await self._collector.settle(trained, evicted, step)

    async def set_version(self, version: int) -> None:
        await self._collector.set_version(version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=20_000, help="groups per measurement")
    parser.add_argument("--ray", action="store_true", help="measure through Ray actors as well")
    arguments = parser.parse_args()
    in_process(arguments.groups)
    if arguments.ray:
        through_ray(arguments.groups)


if __name__ == "__main__":
    main()
