"""Trainer and engine take turns in the same processes; waking carries the new weights.

    training_window: pause -> quiet -> sleep | log-probs, train | publish: wake -> version -> resume

Requests come to rest on entering the window, before log-probs: after the optimizer step the old weights are gone.
The collector stays paused from there until `publish` has woken the engine, so that no group starts on a sleeping one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from ..interfaces import Collector, Engine
from .quiet import Quiet


class ColocatedSync:
    """`WeightSync` for an engine that lives in the trainer's processes."""

    def __init__(self, *, collector: Collector, engine: Engine, quiet: Quiet):
        self._collector = collector
        self._engine = engine
        self._quiet = quiet
        self._pause = AsyncExitStack()

    @asynccontextmanager
    async def training_window(self) -> AsyncIterator[None]:
        await self._pause.enter_async_context(self._collector.paused())
        try:
            await self._quiet.enter()
            await self._engine.sleep()
            yield
        except BaseException:
            await self._pause.aclose()
            raise

    async def publish(self, version: int) -> None:
        async with self._pause:
            await self._engine.wake()
            await self._engine.set_version(version)
            await self._quiet.leave()
            await self._collector.set_version(version)
