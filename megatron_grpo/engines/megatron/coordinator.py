"""Megatron's request coordinator in a thread of the primary rank.

Megatron would spawn a process for it, which imports everything again (7 s); its work is a few messages per request, so
a thread starts in milliseconds and costs nothing that shows. It routes requests of the clients to the data-parallel
replicas (fewest running first) and passes control signals to all of them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import threading
from collections.abc import Callable
from typing import Any

from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

# Importing the coordinator makes the process dump its stacks on these signals; an ordinary stop is no crash.
for _signal in (signal.SIGTERM, signal.SIGINT):
    faulthandler.unregister(_signal)


class _IdsOnly(DataParallelInferenceCoordinator):
    """Megatron's coordinator without text: turning every reply into a string cost a tenth of a short request."""

    def detokenize(self, finished_request: dict[str, Any]) -> None:
        pass


class CoordinatorThread:
    """`on_failure` is called, on the coordinator's thread, with what ended it; a requested end calls nothing."""

    def __init__(self, *, host: str, num_replicas: int, on_failure: Callable[[BaseException], None]):
        self._host = host
        self._num_replicas = num_replicas
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self.ready = threading.Event()  # every replica has registered

    def start(self, controller: TextGenerationController, context: DynamicInferenceContext, timeout_s: float) -> int:
        """Start listening and return the port. Raises TimeoutError when nothing listens after `timeout_s`."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        settings = {
            "pipe_connection": theirs,
            "ready_event": self.ready,
            "data_parallel_size": self._num_replicas,
            "tokenizer": controller.tokenizer,
            "max_requests": context.max_requests,
            "block_size_tokens": context.block_size_tokens,
            "enable_prefix_caching": context.enable_prefix_caching,
            "prefix_caching_coordinator_policy": context.prefix_caching_coordinator_policy,
            "prefix_caching_routing_alpha": context.prefix_caching_routing_alpha,
            "hostname": self._host,
        }
        self._thread = threading.Thread(target=self._serve, args=(settings,), name="engine-coordinator", daemon=True)
        self._thread.start()
        with ours:
            if not ours.poll(timeout_s):
                raise TimeoutError(f"the inference coordinator does not listen on {self._host} after {timeout_s:g} s")
            return int(ours.recv().rsplit(":", 1)[1])

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after a shutdown was sent; it is a daemon, so a late one holds up nothing."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _serve(self, settings: dict) -> None:
        try:
            _IdsOnly.entrypoint(**settings)
        except BaseException as error:
            self._on_failure(error)
            raise
