"""Asynchronous GRPO in one screen. Sync training is the same loop: its window of open targets is {step}.

Each collaborator is an object behind a protocol of `interfaces`; the loop knows no Ray, no Megatron, no mode flags.

    replay      waits for exactly P groups of a step; a dead producer closes it with its own error
    weight_sync who owns the GPUs when, and how new weights reach the engine: a strategy
    trainer     log-probs at the start of the step, then the optimizer updates
    collector   starts groups in the background; told which prompts were trained and which came back
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from .errors import EndOfData
from .interfaces import Collector, Replay, Trainer, WeightSync
from .metrics import Stopwatch
from .types import (
    Collected,
    RolloutBatch,
    Sampled,
    ScoredBatch,
    TrainBatch,
    TrainResult,
    TrajectoryGroup,
    ValidationResult,
)

log = logging.getLogger(__name__)


class Batcher(Protocol):
    """Pure: groups -> padded rollouts -> updates with advantages."""

    def rollouts(self, groups: Sequence[TrajectoryGroup]) -> RolloutBatch: ...

    def updates(self, scored: ScoredBatch) -> list[TrainBatch]: ...


class Reporter(Protocol):
    """Shows and records; never decides."""

    def step(
        self,
        step: int,
        *,
        sampled: Sampled,
        scored: ScoredBatch,
        trained: TrainResult,
        collected: Collected,
        clock: Stopwatch,
    ) -> None: ...

    def validated(self, step: int, result: ValidationResult) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything a run consists of, wired by `launch`."""

    start_step: int
    num_steps: int
    replay: Replay
    collector: Collector
    weight_sync: WeightSync
    trainer: Trainer
    batcher: Batcher
    reporter: Reporter
    validation_due: Callable[[int], bool]  # by the number of finished steps


async def async_grpo_train(run: Run) -> int:
    """Train steps `start_step .. num_steps - 1` and return the number of finished steps.

    That number is below `num_steps` only when the prompts ran out. Any failure of a part is raised with its cause.
    """
    await run.weight_sync.publish(run.start_step)
    finished = run.start_step
    async with run.collector.collecting():
        await _validate(run, finished)
        while finished < run.num_steps:
            try:
                await _train_one_step(run, finished)
            except EndOfData as end:
                log.warning("the prompts ended after step %d of %d: %s", finished, run.num_steps, end)
                break
            finished += 1
            await _validate(run, finished)
    return finished


async def _train_one_step(run: Run, step: int) -> None:
    clock = Stopwatch()
    with clock.measure("wait_for_groups"):
        sampled = (await run.replay.sample(step)).in_prompt_order()
    async with AsyncExitStack() as window:
        with clock.measure("enter_window"):
            await window.enter_async_context(run.weight_sync.training_window())
        with clock.measure("logprobs"):
            scored = await run.trainer.score(run.batcher.rollouts(sampled.groups))
        with clock.measure("train"):
            trained = await run.trainer.train(run.batcher.updates(scored))
    await run.collector.settle([group.ordinal for group in sampled.groups], sampled.evicted, step)
    with clock.measure("publish"):
        await run.weight_sync.publish(step + 1)
    collected = await run.collector.collected()
    run.reporter.step(step, sampled=sampled, scored=scored, trained=trained, collected=collected, clock=clock)


async def _validate(run: Run, finished: int) -> None:
    if not run.validation_due(finished):
        return
    async with run.collector.paused():
        run.reporter.validated(finished, await run.collector.evaluate())
