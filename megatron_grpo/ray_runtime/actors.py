"""Thin actors around pure objects. Each has `hold`, a call that never returns: Ray fails it when the process dies.

All are asyncio actors, so that `hold` and control calls answer while work goes on. What must not interleave (Megatron
collectives) runs on one thread inside `megatron_worker`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from ..checkpoint.files import what_to_do
from ..errors import CheckpointError
from ..replay.buffer import ReplayBuffer
from ..replay.storage import SavedBuffer, load_buffer, save_buffer
from ..types import Sampled, TrajectoryGroup

log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(log_dir: str, name: str) -> None:
    """Send this process's logging to `log_dir/workers/NAME.log`; the driver's terminal stays readable."""
    folder = Path(log_dir) / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '-').replace('/', '-')}.log"
    logging.basicConfig(filename=path, level=logging.INFO, format=_FORMAT, force=True)
    logging.getLogger(__name__).info("%s is process %d on %s", name, os.getpid(), socket.gethostname())


class Held:
    """Mixin: the call that supervision waits on."""

    async def hold(self) -> None:
        await asyncio.Event().wait()

    async def process_id(self) -> int:
        return os.getpid()


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSettings:
    capacity: int
    num_prompts_per_step: int
    max_age: int
    num_steps: int
    sample_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredGroups:
    """What a restored buffer holds, by ordinal: target steps and oldest versions. `has_ordinals` None: no file."""

    target_of: Mapping[int, int]
    oldest_versions: Mapping[int, int]
    has_ordinals: bool | None


@ray.remote(num_cpus=0, max_concurrency=100_000)
class ReplayBufferActor(Held):
    """The replay buffer in its own process: producers and the loop wait inside it, not by asking again."""

    def __init__(self, settings: BufferSettings, log_dir: str):
        log_to_file(log_dir, "replay buffer")
        self._capacity = settings.capacity
        self._writing: asyncio.Task[None] | None = None
        self._buffer = ReplayBuffer(
            capacity=settings.capacity,
            num_prompts_per_step=settings.num_prompts_per_step,
            max_age=settings.max_age,
            num_steps=settings.num_steps,
            sample_timeout_s=settings.sample_timeout_s,
        )

    async def add(self, group: TrajectoryGroup) -> None:
        await self._buffer.add(group)

    async def sample(self, target_step: int) -> Sampled:
        return await self._buffer.sample(target_step)

    async def close(self, cause: str) -> None:
        await self._buffer.close(cause)

    async def end_of_data(self, first_missing_target: int) -> None:
        await self._buffer.end_of_data(first_missing_target)

    async def restore(self, path: Path | None, resume_step: int) -> RestoredGroups:
        """Start with what of the file is usable; `path` None: with nothing. Raises CheckpointError naming the file."""
        saved = None if path is None else await asyncio.to_thread(load_buffer, path)
        restored = self._buffer.restore(() if saved is None else saved.groups, resume_step)
        log.info("restored %d groups for step %d; generated anew: %s", len(restored.kept), resume_step, restored.dropped)
        return RestoredGroups(
            target_of=self._buffer.held,
            oldest_versions={group.ordinal: group.generation_version for group in self._buffer.groups},
            has_ordinals=None if saved is None else saved.has_ordinals,
        )

    async def begin_save(self, path: Path, *, with_ordinals: bool) -> None:
        """Take the groups of this moment and write them in a thread; `finish_save` waits for it."""
        saved = SavedBuffer(
            groups=self._buffer.groups,
            last_sampled=self._buffer.last_sampled,
            max_size=self._capacity,
            has_ordinals=with_ordinals,
        )
        self._writing = asyncio.create_task(asyncio.to_thread(_write, path, saved))

    async def finish_save(self) -> None:
        assert self._writing is not None, "no save was begun"
        await self._writing


def _write(path: Path, saved: SavedBuffer) -> None:
    try:
        save_buffer(path, saved)
    except OSError as error:
        raise CheckpointError(f"{path} was not written: {what_to_do(error, path.parent.parent)}") from error
