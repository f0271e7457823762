"""Asynchronous GRPO in one screen. Sync training is the same loop: its window of open targets is {step}.

Each collaborator is an object behind a protocol of `interfaces`; the loop knows no Ray, no Megatron, no mode flags.

    replay      waits for exactly P groups of a step; a dead producer closes it with its own error
    weight_sync who owns the GPUs when, and how new weights reach the engine: a strategy
    trainer     log-probs at the start of the step, then the optimizer updates
    collector   starts groups in the background; told which prompts were trained and which came back
    checkpoints keeps the state of a step boundary, before the new weights are published
    stop        a request to end at the next step boundary

A save precedes `publish`: a colocated engine is still asleep then, and a disjoint one goes on generating. A validation
that is due runs after `publish`, while the save is being written; `checkpoints` is told its result in time. A request
to stop is answered after the running step, at once while the loop waits for groups, and after a running validation.
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
from .stopping import Stopped, StopRequest
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


class Checkpoints(Protocol):
    """Saves in the background what a resumed run needs; `finished` counts the finished steps."""

    def due(self, finished: int) -> bool: ...

    def lacks(self, finished: int) -> bool:
        """Whether something was trained since the last save."""
        ...

    async def save(self, finished: int) -> None:
        """Copy the state of this step boundary. Afterwards training may go on; the checkpoint is not complete yet."""
        ...

    def validated(self, finished: int, result: ValidationResult) -> None: ...

    async def poll(self) -> None:
        """Complete a save whose files are written; raises what made it fail."""
        ...

    async def finish(self) -> None:
        """Wait until no save is under way."""
        ...


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
    checkpoints: Checkpoints
    stop: StopRequest


async def async_grpo_train(run: Run) -> int:
    """Train steps `start_step .. num_steps - 1` and return the number of finished steps.

    That number is below `num_steps` only when the prompts ran out or the run was asked to stop; what was trained is
    saved then. Any failure of a part is raised with its cause.
    """
    run.stop.is_heard = True
    await run.weight_sync.publish(run.start_step)
    finished = run.start_step
    async with run.collector.collecting():
        if run.start_step == 0:
            await _validate(run, 0)
        while finished < run.num_steps and not run.stop.requested:
            try:
                await _train_one_step(run, finished)
            except EndOfData as end:
                log.warning("the prompts ended after step %d of %d: %s", finished, run.num_steps, end)
                break
            except Stopped:
                break
            finished += 1
            await _validate(run, finished)
            await run.checkpoints.poll()
        await _save_the_rest(run, finished)
    return finished


async def _train_one_step(run: Run, step: int) -> None:
    clock = Stopwatch()
    with clock.measure("wait_for_groups"):
        sampled = (await run.stop.interrupts(run.replay.sample(step))).in_prompt_order()
    async with AsyncExitStack() as window:
        with clock.measure("enter_window"):
            await window.enter_async_context(run.weight_sync.training_window())
        with clock.measure("logprobs"):
            scored = await run.trainer.score(run.batcher.rollouts(sampled.groups))
        with clock.measure("train"):
            trained = await run.trainer.train(run.batcher.updates(scored))
    await run.collector.settle([group.ordinal for group in sampled.groups], sampled.evicted, step)
    is_last = run.stop.requested
    if run.checkpoints.due(step + 1) or (is_last and run.checkpoints.lacks(step + 1)):
        with clock.measure("checkpoint"):
            await run.checkpoints.save(step + 1)
    if not is_last:
        with clock.measure("publish"):
            await run.weight_sync.publish(step + 1)
    collected = await run.collector.collected()
    run.reporter.step(step, sampled=sampled, scored=scored, trained=trained, collected=collected, clock=clock)


async def _validate(run: Run, finished: int) -> None:
    if run.stop.requested or not run.validation_due(finished):
        return
    async with run.collector.paused():
        result = await run.collector.evaluate()
        run.reporter.validated(finished, result)
    run.checkpoints.validated(finished, result)


async def _save_the_rest(run: Run, finished: int) -> None:
    """At the end of the run. Steps that no save has seen end with the engine awake: the trainer takes its GPUs back."""
    if run.checkpoints.lacks(finished):
        async with run.weight_sync.training_window():
            await run.checkpoints.save(finished)
    await run.checkpoints.finish()
