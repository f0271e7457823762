"""Control calls to several ranks at once. They end: with all answers, with every cause, or at their deadline.

A rank has the same deadline for what it waits for itself, and knows more; the driver's comes a little later and is for
ranks that do not answer at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DeadlineExceeded, RunFailed
from .supervision import Named, answer

_GRACE_S = 2.0  # how long the other ranks may take to tell their part after a failure or a deadline


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    actor: Named
    method: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.actor.name}: {self.method}"

    async def answer(self) -> Any:
        return await answer(self.actor, getattr(self.actor.handle, self.method).remote(*self.args))


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """`setting` is the recipe key that sets it."""

    seconds: float
    setting: str


async def answers_within(deadline: Deadline, calls: Sequence[Call]) -> list[Any]:
    """The answers in the order of the calls, which start together: their collectives meet.

    Raises a failure alone as it came, several as one RunFailed; DeadlineExceeded, naming actor and call, for ranks that
    have not answered. Calls that are still running are given up.
    """
    since = time.strftime("%H:%M:%S")
    running = {asyncio.ensure_future(call.answer()): call for call in calls}
    try:
        await asyncio.wait(running, timeout=deadline.seconds + _GRACE_S, return_when=asyncio.FIRST_EXCEPTION)
        if _failures(running):
            await asyncio.wait(running, timeout=_GRACE_S)
        failures = _failures(running)
        late = [str(call) for task, call in running.items() if not task.done()]
        if late:
            waited = f"no answer since {since} (deadline {deadline.setting} = {deadline.seconds:g} s)"
            raise DeadlineExceeded("\n".join([*(f"{call}: {waited}" for call in late), *map(str, failures)]))
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise RunFailed("\n".join(dict.fromkeys(map(str, failures))))
        return [task.result() for task in running]
    finally:
        for task in running:
            task.cancel()


def _failures(tasks: Sequence[asyncio.Task]) -> list[BaseException]:
    done = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in done if (error := task.exception()) is not None]
