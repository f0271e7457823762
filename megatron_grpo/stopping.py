"""A request to end the run at the next step boundary: a signal, or the time that the job has left. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why a run ends early; `requeue`: whether a launcher should start it again."""

    ending: Literal["preempted", "deadline"]
    requeue: bool
    reason: str


class Stopped(Exception):
    """The wait was given up because the run was asked to stop."""


class StopRequest:
    """The first request stays. `is_heard` turns true when the loop starts to look at it: from then on the loop ends
    the run; before, nothing was trained and whoever asks may end it at once.
    """

    def __init__(self) -> None:
        self.is_heard = False
        self.stop: Stop | None = None
        self._requested = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self.stop is not None

    def request(self, stop: Stop) -> None:
        if self.stop is None:
            self.stop = stop
            self._requested.set()

    async def interrupts[T](self, waiting: Awaitable[T]) -> T:
        """The result of `waiting`; Stopped when a request comes first, and `waiting` is cancelled."""
        work = asyncio.ensure_future(waiting)
        request = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait({work, request}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Stopped
            return work.result()
        finally:
            for task in (work, request):
                task.cancel()
            await asyncio.gather(work, request, return_exceptions=True)
