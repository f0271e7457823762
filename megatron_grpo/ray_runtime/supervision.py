"""Dead actors end the run. One pending `hold` call per actor: Ray fails it the moment the process is gone.

| who waits | for what | woken by | ends |
|---|---|---|---|
| `first_failure` | every actor's `hold` | Ray (process died) or the actor (engine failed) | raises RunFailed naming it |
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ..errors import MegatronGrpoError, RunFailed

log = logging.getLogger(__name__)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Ray colours its tracebacks, also for files
_GRACE_S = 5.0  # how long a failed call waits for the supervisor to learn the deeper cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """An actor handle with the name that logs and errors use."""

    name: str
    handle: Any


def plain_error(name: str, error: BaseException) -> BaseException:
    """Ray's wrappers taken off: our own errors as they were raised, a death as RunFailed naming the actor."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegatronGrpoError):
            return cause
        return RunFailed(f"{name} failed: {error}")
    if isinstance(error, RayActorError):
        if error.actor_init_failed:  # its constructor raised: the traceback is the message
            return RunFailed(f"{name} could not start: {_COLOURS.sub('', str(error))}")
        return RunFailed(f"{name} died: {_first_line(error)}")
    return error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = [line for line in lines if line.startswith(("pid:", "The actor is dead because"))]
    return "; ".join([lines[0], *detail]) if lines else type(error).__name__


async def answer(actor: Named, reference: Awaitable) -> Any:
    """The result of a remote call; failures as `plain_error` puts them."""
    try:
        return await reference
    except (RayTaskError, RayActorError) as error:
        raise plain_error(actor.name, error) from None


class Supervisor:
    """Knows every actor of the run, reports the first that dies, and ends them all."""

    def __init__(self) -> None:
        self._actors: list[Named] = []

    def watch(self, actor: Named) -> None:
        self._actors.append(actor)

    async def first_failure(self) -> None:
        """Return never; raise the first failure of a watched actor."""
        holds = [asyncio.ensure_future(answer(actor, actor.handle.hold.remote())) for actor in self._actors]
        try:
            await asyncio.gather(*holds)
            raise RunFailed("an actor ended although the run was going on")
        finally:
            for hold in holds:
                hold.cancel()

    async def supervise(self, work: asyncio.Task) -> Any:
        """The result of `work`, or the failure that explains why it could not finish."""
        watch = asyncio.ensure_future(self.first_failure())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (work.cancelled() or work.exception() is not None):
                await asyncio.wait({watch}, timeout=_GRACE_S if isinstance(work.exception(), RunFailed) else 0)
            if watch.done():
                watch.result()
            return work.result()
        finally:
            await _finish(work, watch)

    def end_all(self) -> None:
        """Kill every actor at once: a rank that waits in a collective would never answer a polite request."""
        for actor in self._actors:
            ray.kill(actor.handle, no_restart=True)


async def _finish(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
