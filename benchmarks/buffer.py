"""Microseconds per group through collector and buffer, at 1, 64 and 1024 groups in flight.

    python benchmarks/buffer.py [--groups 20000]

Rollouts cost nothing here: what is left is choosing a target, one asyncio task per group, the buffer, sampling,
prompt accounting. The figure must not grow with the number in flight; neither must that of the buffer alone, nor that
of producers that wait because it is full.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from megatron_grpo.collector import TrajectoryCollector
from megatron_grpo.data.stream import PromptRow, PromptStream
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


async def collector_and_buffer(size: Size) -> float:
    """CPU seconds for all groups of a run in one process (nothing here waits, so other load does not count)."""
    replay = build_buffer(size)
    collector = TrajectoryCollector(
        prompts=PromptStream([ROW] * 4096, num_prompts_per_step=size.num_prompts, seed=0, num_epochs=None),
        rollout=InstantRollout(),
        replay=replay,
        num_prompts_per_step=size.num_prompts,
        max_age=size.max_age,
        num_steps=size.num_steps,
        max_failures=0,
        group_timeout_s=600,
    )
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
    """The same through the collector and buffer actors."""
    raise SystemExit("through Ray: not available yet")


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
