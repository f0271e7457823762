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


async def until_signal(
    work: Coroutine[Any, Any, int], stop: StopRequest, *, saves: bool, must_save_in_s: float | None = None
) -> int | None:
    """Run `work` to its result. Interrupted when a signal ended it; every process was ended before.

    SIGINT cancels at once. With `saves`, SIGTERM, SIGUSR1 and the deadline ask the loop to save and return; before the
    loop runs nothing is new since the last checkpoint, and the work is cancelled: None. Without, signals cancel.
    """
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def ask(request: Stop) -> None:
        log.warning("%s: the run saves and ends", request.reason)
        stop.request(request)
        if not stop.is_heard:
            task.cancel()

    def on_signal(number: signal.Signals) -> None:
        if saves and number != signal.SIGINT:
            requeue = number == signal.SIGUSR1  # a preemption notice; SIGTERM is somebody who wants it to end
            ask(Stop(ending="preempted", requeue=requeue, reason=f"signal {number.name}"))
            return
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, on_signal, number)
    if saves and must_save_in_s is not None:
        deadline = Stop(ending="deadline", requeue=True, reason="checkpointing.checkpoint_must_save_by is reached")
        loop.call_later(max(0.0, must_save_in_s), ask, deadline)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        if stop.requested:
            return None
        raise
