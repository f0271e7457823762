"""The workers of one environment: one call each at a time, callers served in the order they came.

| who waits | for what              | woken by               | ends                                             |
|-----------|-----------------------|------------------------|--------------------------------------------------|
| `take`    | an idle seat          | `give_back`, one each  | with a seat, or with the error given to `fail`   |
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..types import Problem


class RewardWorker(Protocol):
    """A process that holds environments. `name` is what errors call it."""

    name: str

    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> Sequence[object]:
        """One answer per response. RewardFailed: the environment's own error; RunFailed: the process is gone."""
        ...

    async def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> Sequence[bool]: ...

    async def wait_dead(self) -> str:
        """Return, with the reason, when the process is gone. Waits as long as it lives."""
        ...

    async def kill(self) -> None:
        """End the process at once, also in the middle of a call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seat:
    """Place `index` of an environment and the worker that sits there; `death` completes when that worker is gone."""

    env_name: str
    index: int
    worker: RewardWorker
    death: asyncio.Future[str]


class WorkerLane:
    """Idle seats and waiting callers; never both at once."""

    def __init__(self) -> None:
        self._idle: deque[Seat] = deque()
        self._waiting: deque[asyncio.Future[Seat]] = deque()
        self._error: Exception | None = None

    async def take(self) -> Seat:
        """An idle seat. Cancellation gives a seat that was just handed over to the next caller."""
        if self._error is not None:
            raise self._error
        if self._idle:
            return self._idle.popleft()
        turn: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())
            raise

    def give_back(self, seat: Seat) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(seat)
                return
        self._idle.append(seat)

    def fail(self, error: Exception) -> None:
        """Every waiting and every later caller gets `error`."""
        self._error = error
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)
