"""One replica: an AsyncLLM with its child processes, driven from the event loop of the process that owns it.

| call | waits for | ended by |
|---|---|---|
| `generate` | an engine that is open (not paused), then its tokens | the engine's death |
| `pause` | the step under way | the engine's death; the caller's deadline |
| `failed` | the death of the engine's process | raises RunFailed, naming it |

Weights change between `pause` and `resume`. A request that has no token yet when the pause begins is submitted anew
after it: only what has begun goes on across an update. So the first token of a request has the version of its cache
salt, and no new request meets key/value blocks of old weights, also where running ones keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from ...errors import RunFailed
from ...types import Completion, Sampling
from ...weight_sync.wire import Manifest
from .receive import register
from .requests import Gathered, RequestRules, request_seed

logger = logging.getLogger(__name__)


class VllmReplica:
    """Construction starts the engine and blocks until it is ready; on a running event loop. It opens with `resume`,
    after the first weights: those it is built with are noise.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str,
        vocab_size: int,
        eos_id: int,
        seed: int,
        recompute_cache: bool,
    ):
        register()
        self._name = name
        self._seed = seed
        self._recompute_cache = recompute_cache
        self._rules = RequestRules(vocab_size=vocab_size, eos_id=eos_id, max_length=arguments["max_model_len"])
        self._version = 0
        self._open = asyncio.Event()
        self._not_begun: set[asyncio.Task[Completion | None]] = set()
        self._num_attempts = 0
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._paused = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch_processes()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # ---- sampling

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        """`num_generations` completions, each a request of its own, whose samples are a function of (grpo.seed, weight
        version at its start, `request_id`) and the weights. Raises ConfigError for a request the engine cannot take,
        RunFailed when the engine dies.
        """
        prompt = [int(token) for token in prompt_ids]
        self._rules.check(prompt, sampling, request_id)
        requests = [
            asyncio.ensure_future(self._complete(prompt, sampling, request_id, index))
            for index in range(num_generations)
        ]
        try:
            return list(await asyncio.gather(*requests))
        except BaseException:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            raise

    async def _complete(self, prompt: list[int], sampling: Sampling, request_id: str, index: int) -> Completion:
        while True:
            await self._until_open()
            version = self._version
            params = self._rules.sampling_params(sampling, request_seed(self._seed, version, request_id, index))
            attempt = asyncio.ensure_future(self._attempt(prompt, params, version, f"{request_id}-{index}"))
            self._not_begun.add(attempt)
            try:
                await asyncio.wait({attempt})
            finally:
                self._not_begun.discard(attempt)
                attempt.cancel()
            if not attempt.cancelled():
                return attempt.result()

    async def _attempt(self, prompt: list[int], params: SamplingParams, version: int, request_id: str) -> Completion:
        gathered = Gathered(request_id=request_id)
        self._num_attempts += 1
        try:
            async for output in self._submit(prompt, params, version, f"{request_id}-{self._num_attempts}"):
                if not gathered.tokens:
                    self._not_begun.discard(asyncio.current_task())
                gathered.add(output)
        except EngineDeadError as error:
            raise self._dead() from error
        return gathered.completion()

    def _submit(self, prompt: list[int], params: SamplingParams, version: int, request_id: str):
        return self._llm.generate(
            {"prompt_token_ids": prompt, "cache_salt": str(version)}, sampling_params=params, request_id=request_id
        )

    async def _until_open(self) -> None:
        opening = asyncio.ensure_future(self._open.wait())
        try:
            await asyncio.wait({opening, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        if self._failure.done():
            self._failure.result()

    # ---- control

    async def pause(self) -> None:
        """Stop between two steps; requests that have begun keep their state. Harmless when paused."""
        if self._paused:
            return
        self._open.clear()
        # With clear_cache what runs is put back and computes its keys and values anew; vLLM raises where it cannot.
        await self._alive(self._llm.pause_generation(mode="keep", clear_cache=self._recompute_cache))
        starting = list(self._not_begun)
        for attempt in starting:
            attempt.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`; the first time, begin."""
        if self._paused:
            await self._alive(self._llm.resume_generation())
        self._paused = False
        self._open.set()

    async def set_version(self, version: int) -> None:
        """Label tokens from the next one on. Exact while paused."""
        await self._alive(self._llm.update_weight_version(str(version)))
        self._version = version

    # ---- weights, while paused

    async def join(self, init: Mapping[str, Any]) -> None:
        """All workers of this replica meet the trainer's rank 0."""
        await self._alive(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init))))

    async def receive(self, manifest: Manifest, bucket_bytes: int) -> list[dict[str, int]]:
        """Take one stream, together with the trainer's `send`. Each worker's checksums of what arrived, by name.

        A failure leaves an engine that must not generate any more.
        """
        info = {
            "names": [meta.name for meta in manifest],
            "dtypes": [meta.dtype for meta in manifest],
            "shapes": [list(meta.shape) for meta in manifest],
            "bucket_bytes": bucket_bytes,
        }
        await self._alive(self._llm.start_weight_update())
        await self._alive(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))
        await self._alive(self._llm.finish_weight_update())
        answers = await self._alive(self._llm.collective_rpc("received_sums"))
        return [{name: int(value, 16) for name, value in sums.items()} for sums in answers]

    async def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """log p of each token but the first given those before it, at temperature 1: computed, never from a cache."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        last: RequestOutput | None = None
        self._num_attempts += 1
        request_id = f"probe-{self._num_attempts}"
        try:
            async for output in self._submit(list(prompt), params, self._version, request_id):
                last = output
        except EngineDeadError as error:
            raise self._dead() from error
        assert last is not None and last.prompt_logprobs is not None
        return [of_position[token].logprob for token, of_position in zip(prompt[1:], last.prompt_logprobs[1:], strict=True)]

    # ---- life

    async def failed(self) -> None:
        """Return never; raises RunFailed, naming the process, when the engine dies."""
        await asyncio.shield(self._failure)

    def close(self) -> None:
        """End the engine's processes; blocks."""
        self._stop_watching()
        self._llm.shutdown()

    def _watch_processes(self) -> None:
        manager = self._llm.engine_core.resources.engine_manager
        self._processes = list(manager.processes)
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.add_reader(process.sentinel, self._process_ended)

    def _stop_watching(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.sentinel)

    def _process_ended(self) -> None:
        self._stop_watching()
        if not self._failure.done():
            self._failure.set_exception(self._dead())
            self._failure.exception()  # retrieved: nobody need be waiting

    def _dead(self) -> BaseException:
        if self._failure.done():  # told apart from what vLLM's own cleaning up ended
            return self._failure.exception()
        ended = [f"{process.pid} (exit code {process.exitcode})" for process in self._processes if not process.is_alive()]
        return RunFailed(f"{self._name} failed: its engine process {', '.join(ended) or 'is not answering'} ended")

    async def _alive(self, work: Any) -> Any:
        """The result of `work`, or the engine's death, whichever comes first: a dead engine answers nothing."""
        call = asyncio.ensure_future(work)
        try:
            await asyncio.wait({call, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self._failure.result()
            return call.result()
        except EngineDeadError as error:
            raise self._dead() from error
        finally:
            call.cancel()
