"""When a run saves, and the order of a save: what must be copied before training goes on, and what may wait.

    save       tmp_step_N; copies of the policy; state of the prompts (ends a stretch of the ledger); the buffer's groups
    afterwards ranks write their copies, the buffer its file, while the run goes on
    poll       every rank has written: sync, digests, manifest, rename; then older checkpoints are removed

| task               | waits for                                | woken by          | ends                              |
|--------------------|------------------------------------------|-------------------|-----------------------------------|
| loop, `save`       | an earlier save; copies                  | ranks, actors     | copied, or CheckpointError        |
| loop, `finish`     | the files, then the rename               | ranks; the task   | complete, or CheckpointError      |
| completing a save  | the buffer's file; digests and the rename | actor; a thread  | `step_N` is there; its error      |

The three reads need not be of one moment, only of one step boundary: a group that ends in between is pending in the
state of the prompts, and generated again unless the buffer's file has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..data.stream_state import StreamState
from ..errors import CheckpointError
from ..types import ValidationResult
from .contents import POLICY_NAME, STREAM_STATE_NAME
from .directory import CheckpointDirectory
from .files import what_to_do
from .manifest import REPLAY_BUFFER_NAME
from .retention import Retention

log = logging.getLogger(__name__)

METRICS = ("val:accuracy", "val:reward")  # what retention can rank by


class PolicyStore(Protocol):
    async def begin_save(self, path: Path) -> None:
        """Copy the state and start to write it into the empty directory `path`."""
        ...

    async def finish_save(self, *, blocking: bool) -> bool:
        """Whether everything is written."""
        ...


class PromptStore(Protocol):
    async def state_for(self, step: int) -> StreamState:
        """The state of this moment; the ledger notes that checkpoint `step` holds it."""
        ...


class BufferStore(Protocol):
    async def begin_save(self, path: Path, *, with_ordinals: bool) -> None:
        """Take what the buffer holds and start to write it."""
        ...

    async def finish_save(self) -> None:
        """Wait until it is written."""
        ...


@dataclass(kw_only=True, slots=True)
class _Save:
    step: int
    since: float
    metrics: dict[str, float] = field(default_factory=dict)
    completing: asyncio.Task[None] | None = None


class RunCheckpoints:
    """The loop's `Checkpoints`. One save at a time; `last_saved` is the step the run resumed from, or 0.

    `documents(step)` are the small files by name. The metric that retention ranks by is measured after the save: it
    reaches the manifest because a save is completed at the earliest by the `poll` behind the validation.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        retention: Retention,
        *,
        policy: PolicyStore,
        prompts: PromptStore,
        buffer: BufferStore,
        documents: Callable[[int], Mapping[str, str]],
        num_steps: int,
        last_saved: int,
    ):
        self._directory = directory
        self._retention = retention
        self._policy = policy
        self._prompts = prompts
        self._buffer = buffer
        self._documents = documents
        self._num_steps = num_steps
        self._last_saved = last_saved
        self._save: _Save | None = None
        if retention.keep_top_k is not None and retention.metric_name not in (None, *METRICS):
            log.warning(
                "checkpointing.metric_name %r is not measured when a checkpoint is kept or removed (%s are): the newest "
                "stay", retention.metric_name, ", ".join(METRICS)
            )  # fmt: skip

    def due(self, finished: int) -> bool:
        return self.lacks(finished) and (finished % self._retention.save_period == 0 or finished == self._num_steps)

    def lacks(self, finished: int) -> bool:
        return finished > self._last_saved

    async def save(self, finished: int) -> None:
        """Raises CheckpointError; earlier checkpoints are intact then."""
        await self.finish()
        since = time.monotonic()
        path = await asyncio.to_thread(self._directory.begin, finished)
        try:
            await self._copy(finished, path)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint step_{finished} was not written: {what_to_do(error, self._directory.root)}"
            ) from error
        self._save = _Save(step=finished, since=since)
        self._last_saved = finished
        log.info("checkpoint of step %d: training stalled for %.2f s", finished, time.monotonic() - since)

    async def _copy(self, finished: int, path: Path) -> None:
        (path / POLICY_NAME).mkdir()
        await self._policy.begin_save(path / POLICY_NAME)
        state = await self._prompts.state_for(finished)
        await self._buffer.begin_save(path / REPLAY_BUFFER_NAME, with_ordinals=state.frontier is not None)
        for name, text in {STREAM_STATE_NAME: state.to_json(), **self._documents(finished)}.items():
            (path / name).write_text(text)

    def validated(self, finished: int, result: ValidationResult) -> None:
        if self._save is not None and self._save.step == finished:
            self._save.metrics |= dict(zip(METRICS, (result.accuracy, result.mean_reward), strict=True))

    async def poll(self) -> None:
        await self._advance(blocking=False)

    async def finish(self) -> None:
        await self._advance(blocking=True)

    async def _advance(self, *, blocking: bool) -> None:
        save = self._save
        if save is None:
            return
        if save.completing is None:
            if not await self._policy.finish_save(blocking=blocking):
                return
            save.completing = asyncio.create_task(self._complete(save))
        if blocking or save.completing.done():
            self._save = None
            await save.completing

    async def _complete(self, save: _Save) -> None:
        await self._buffer.finish_save()
        await asyncio.to_thread(self._commit, save)

    def _commit(self, save: _Save) -> None:
        self._directory.commit(save.step, save.metrics)
        log.info("checkpoint of step %d took %.2f s", save.step, time.monotonic() - save.since)
        self._directory.retain(self._retention)


class NoCheckpoints:
    """The loop's `Checkpoints` where checkpointing is off."""

    def due(self, finished: int) -> bool:
        return False

    def lacks(self, finished: int) -> bool:
        return False

    async def save(self, finished: int) -> None:
        raise AssertionError("nothing is ever due")

    def validated(self, finished: int, result: ValidationResult) -> None:
        return None

    async def poll(self) -> None:
        return None

    async def finish(self) -> None:
        return None
