"""Disjoint GPUs, drain mode: running generations finish under the old weights, then the transfer starts.

| step of `publish` | waits for | ended by |
|---|---|---|
| pause the collector | nothing: no new group starts | resumed when the block ends, also on error |
| drain | every generating group | each group's own deadline |
| transfer | trainer and engine ranks together | `timeouts.refit` -> WeightSyncFailed |
| set version | the engine's acknowledgement | only after the transfer was confirmed |
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..interfaces import Collector, Engine, WeightTransfer


class DrainSync:
    """`WeightSync` for engines on their own GPUs; nothing to hand over while training."""

    def __init__(self, *, collector: Collector, engine: Engine, transfer: WeightTransfer):
        self._collector = collector
        self._engine = engine
        self._transfer = transfer

    @asynccontextmanager
    async def training_window(self) -> AsyncIterator[None]:
        yield

    async def publish(self, version: int) -> None:
        async with self._collector.paused():
            await self._collector.drain()
            await self._transfer.transfer()
            await self._engine.set_version(version)
            await self._collector.set_version(version)
