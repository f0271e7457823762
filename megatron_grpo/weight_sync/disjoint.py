"""The engine has its own GPUs: weights travel to it after every step.

| step of `publish` | waits for | ended by |
|---|---|---|
| pause the collector | nothing: no new group starts | resumed when the block ends, also on error |
| quiet | running groups (drain) or the engine's pause (in flight) | group deadlines, `timeouts.refit` |
| transfer | trainer and engine ranks together | `timeouts.refit` -> WeightSyncFailed |
| set version | the engine's acknowledgement | only after the transfer was confirmed |

A failed transfer leaves the engine paused: it must not serve a mix, and the run ends with the cause.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..interfaces import Collector, Engine, WeightTransfer
from .quiet import Quiet


class DisjointSync:
    """`WeightSync` with nothing to hand over while training."""

    def __init__(self, *, collector: Collector, engine: Engine, transfer: WeightTransfer, quiet: Quiet):
        self._collector = collector
        self._engine = engine
        self._transfer = transfer
        self._quiet = quiet

    @asynccontextmanager
    async def training_window(self) -> AsyncIterator[None]:
        yield

    async def publish(self, version: int) -> None:
        async with self._collector.paused():
            await self._quiet.enter()
            await self._transfer.transfer()
            await self._engine.set_version(version)
            await self._quiet.leave()
            await self._collector.set_version(version)
