"""How running requests are brought to a standstill before weights change. One object per mode, chosen once.

| mode | on `enter` | running requests |
|---|---|---|
| `Drained` | wait until no group generates, then pause the engine | finished under the old weights |
| `InFlight` | pause the engine | keep their state and go on under the new weights |
| `Unpaused` | nothing: the backend has no pause hook | its own synchroniser must cope |
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

from ..interfaces import Collector, Engine

log = logging.getLogger(__name__)


class Quiet(Protocol):
    """`enter` comes inside a collector pause; `leave` only after the new weights are confirmed."""

    async def enter(self) -> None: ...

    async def leave(self) -> None: ...


class Drained:
    def __init__(self, collector: Collector, engine: Engine):
        self._collector = collector
        self._engine = engine

    async def enter(self) -> None:
        await self._collector.drain()
        await self._engine.pause()

    async def leave(self) -> None:
        await self._engine.resume()


class InFlight:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def enter(self) -> None:
        await self._engine.pause()

    async def leave(self) -> None:
        await self._engine.resume()


class Unpaused:
    async def enter(self) -> None:
        return None

    async def leave(self) -> None:
        return None


class DrainedOnly:
    """Drain mode of a backend without a pause hook: nothing runs, so nothing needs to be paused."""

    def __init__(self, collector: Collector):
        self._collector = collector

    async def enter(self) -> None:
        await self._collector.drain()

    async def leave(self) -> None:
        return None


def choose_quiet(collector: Collector, engine: Engine, *, in_flight: bool) -> Quiet:
    """The mode for a backend; one that cannot do what was asked is warned about once per type and process."""
    capabilities = engine.capabilities
    pauses = capabilities.pauses_in_flight
    if capabilities.must_drain or not in_flight:
        return Drained(collector, engine) if pauses else DrainedOnly(collector)
    if pauses:
        return InFlight(engine)
    _warn_once(type(engine).__name__)
    return Unpaused()


@cache
def _warn_once(backend: str) -> None:
    log.warning(
        "grpo.async_grpo.in_flight_weight_updates is true, but the backend %s cannot pause requests: "
        "weights change without pause or drain",
        backend,
    )
