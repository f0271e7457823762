"""The engine's own thread and event loop, and the watch over them.

| who | runs where | ends by |
|---|---|---|
| engine loop, client socket, control signals | the host's loop, on its thread | `close`, or a failure |
| coordinator (primary rank) | its own thread | `close`, or a failure |
| callers of `submit` | any thread or loop; they hold a concurrent future | result, or the failure |

An exception inside Megatron's loop becomes `sys.exit` in a task: the loop stops, its thread ends, and futures that
waited for replies would never resolve. So every call goes through `submit`, which remembers its future, and whatever
ends the thread before `close` fails all of them and `failure` with the engine's own traceback.

Nothing else may run on this loop: ranks of one model replica step in lockstep, and a rank that waits for its leader
blocks the thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
import zmq
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_client import InferenceClient

from ...errors import DeadlineExceeded, RunFailed
from .coordinator import CoordinatorThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0


class EngineHost:
    """Runs `engine` until `close`. On the primary rank also the coordinator and the client that submits requests.

    Collective over the engine's world: every rank constructs its host at the same time.
    `timeout_s` bounds each wait for another rank.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, *, is_primary: bool, host: str, num_replicas: int, timeout_s: float
    ):
        self.engine = engine
        self.is_primary = is_primary
        self.failure: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.failure.set_running_or_notify_cancel()  # a cancelled watcher must not pass for a dead engine
        self._host = host
        self._timeout_s = timeout_s
        self._pending: set[concurrent.futures.Future] = set()
        self._lock = threading.Lock()  # guards _pending, _closing and the moment of failure
        self._closing = False
        self._client: InferenceClient | None = None
        self._coordinator = CoordinatorThread(host=host, num_replicas=num_replicas, on_failure=self._fail)
        self._loop = asyncio.new_event_loop()
        # The thread count for kernels belongs to each thread; a new one would take every core.
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run_loop, name="engine", daemon=True)
        self._thread.start()
        self._call(self._start())

    @property
    def client(self) -> InferenceClient:
        """For use on the host's loop only: its socket and futures belong to that thread."""
        assert self._client is not None, "only the primary rank submits requests"
        return self._client

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the host's loop. The future always ends: with the result, or with the engine's failure.

        Cancelling the future does not cancel the work (the engine cannot drop a request); its result is discarded.
        """
        outer: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self.failure.done() or self._closing:
                work.close()
                outer.set_exception(self.failure.exception() if self.failure.done() else RunFailed("engine closed"))
                return outer
            self._pending.add(outer)
        asyncio.run_coroutine_threadsafe(self._settle(work, outer), self._loop)
        return outer

    async def signal(self, send: Callable[[InferenceClient], None], state: EngineState) -> None:
        """On the host's loop: send a control signal (primary rank) and wait until this rank is in `state`."""
        if self.is_primary:
            send(self.client)
        try:
            await asyncio.wait_for(self.engine.wait_until(state), self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"generation engine: waited {self._timeout_s:g} s for {state.name}, still {self.engine.state.name}"
            ) from None

    def close(self) -> None:
        """Stop the engine on every rank (collective) and end the threads. Harmless after a failure or a first close."""
        if self.failure.done() or self._closing:
            return
        self._call(self._stop())
        with self._lock:
            self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._coordinator.join(CLOSE_TIMEOUT_S)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._fail_pending(RunFailed("the generation engine was closed"))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self.submit(work).result(self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"generation engine: {work.__name__} took over {self._timeout_s:g} s") from None

    async def _settle(self, work: Coroutine[Any, Any, T], outer: concurrent.futures.Future[T]) -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            if self._claim(outer):
                outer.set_exception(error)
        else:
            if self._claim(outer):
                outer.set_result(result)

    def _claim(self, future: concurrent.futures.Future) -> bool:
        """Whether the caller is the one to end `future`: not when a failure on another thread or a cancel has."""
        with self._lock:
            if future not in self._pending:
                return False
            self._pending.remove(future)
        return future.set_running_or_notify_cancel()

    async def _start(self) -> None:
        port = None
        if self.is_primary:
            port = self._coordinator.start(self.engine.controller, self.engine.context, self._timeout_s)
        address = await self.engine.start_listening_to_data_parallel_coordinator(
            port, launch_inference_coordinator=False, hostname=self._host, loop=self._loop
        )
        self.engine.engine_loop_task.add_done_callback(self._loop_ended)
        if not self.engine.is_mp_coordinator:
            # This rank blocks until its leader's next step; without a limit it would outlive a dead leader.
            self.engine.model_parallel_subscriber_socket.setsockopt(zmq.RCVTIMEO, int(1000 * self._timeout_s))
        if self.is_primary:
            if not await asyncio.to_thread(self._coordinator.ready.wait, self._timeout_s):
                raise DeadlineExceeded(f"generation engine: not every replica registered within {self._timeout_s:g} s")
            self._client = InferenceClient(address)
            self._client.start(loop=self._loop)

    async def _stop(self) -> None:
        if self.engine.state not in (EngineState.PAUSED, EngineState.SUSPENDED):
            await self.signal(InferenceClient.pause_engines, EngineState.PAUSED)
        await self.signal(InferenceClient.stop_engines, EngineState.STOPPED)
        if self.is_primary:
            self.client.shutdown_coordinator()
            self.client.stop()
            await asyncio.sleep(0)  # lets the client's listener end before the loop does

    def _run_loop(self) -> None:
        torch.set_num_threads(self._num_threads)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:  # noqa: BLE001 - SystemExit of Megatron's exception tracer included
            self._fail(error)
        else:
            self._fail(RuntimeError("the engine's event loop was stopped"))
            self._loop.close()

    def _loop_ended(self, task: asyncio.Task) -> None:
        if task.cancelled() or task.exception() is not None:
            self._fail(RuntimeError("cancelled") if task.cancelled() else task.exception())

    def _fail(self, error: BaseException) -> None:
        """The first failure before `close` ends every pending call."""
        with self._lock:
            if self._closing or self.failure.done():
                return
            cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
            text = "".join(traceback.format_exception(cause))
            failure = RunFailed(f"the generation engine died: {cause!r}\n{text}")
            failure.__cause__ = cause
            self.failure.set_exception(failure)
        logger.error("%s", failure)
        self._fail_pending(failure)

    def _fail_pending(self, failure: RunFailed) -> None:
        with self._lock:
            pending, self._pending = self._pending, set()
        for future in pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
