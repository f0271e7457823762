"""Signals and the deadline of the job, turned into a request to the loop or into an end at once."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from .errors import Interrupted
from .stopping import Stop, StopRequest

log = logging.getLogger(__name__)

DEADLINE = Stop(ending="deadline", requeue=True, reason="checkpointing.checkpoint_must_save_by is reached")


async def until_signal(
    work: Coroutine[Any, Any, int], stop: StopRequest, *, saves: bool, must_save_in_s: float | None = None
) -> int | None:
    """Run `work` to its result. Interrupted when a signal ended it; every process was ended before.

    SIGINT cancels at once. With `saves`, SIGTERM, SIGUSR1 and the deadline ask the loop to save and return; before the
    loop runs nothing is new since the last checkpoint, and the work is cancelled: None. Without, signals cancel.
    """
    ends = _Ends(asyncio.ensure_future(work), stop)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, ends.cancel, signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, ends.preempt if saves else ends.cancel, number)
    if saves and must_save_in_s is not None:
        loop.call_later(max(0.0, must_save_in_s), ends.ask, DEADLINE)
    try:
        return await ends.task
    except asyncio.CancelledError:
        if ends.cancelled_by is not None:
            raise Interrupted(ends.cancelled_by) from None
        if stop.requested:
            return None
        raise


class _Ends:
    """How `task` is brought to its end."""

    def __init__(self, task: asyncio.Task[int], stop: StopRequest):
        self.task = task
        self.cancelled_by: signal.Signals | None = None
        self._stop = stop

    def cancel(self, number: signal.Signals) -> None:
        self.cancelled_by = number
        self.task.cancel()

    def preempt(self, number: signal.Signals) -> None:
        requeue = number == signal.SIGUSR1  # a preemption notice; SIGTERM is somebody who wants it to end
        self.ask(Stop(ending="preempted", requeue=requeue, reason=f"signal {number.name}"))

    def ask(self, request: Stop) -> None:
        log.warning("%s: the run saves and ends", request.reason)
        self._stop.request(request)
        if not self._stop.is_heard:
            self.task.cancel()
