"""One rank of the Megatron generation engine: samples completions, knows weight versions, sleeps and wakes.

Control calls (`set_version`, `pause`, `resume`, `sleep`, `wake`, `close`) are collective: every rank of the engine's
world makes them, in the same order, and the caller awaits all before the next. `generate` belongs to the primary rank
(rank 0), which spreads requests over the data-parallel replicas.

Weights may change while the engine is paused or asleep. By then all that was derived from the old ones and could be
met by a new request is gone; what running requests keep of it is told in `kv_cache`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer.module import MegatronModule

from ...types import Completion, Sampling
from . import decode_cache, prefix_cache
from .engine_host import EngineHost
from .engine_setup import build_engine
from .kv_cache import KvBytes, KvCache
from .requests import RequestRules
from .sampling import stream_id

if TYPE_CHECKING:
    from ...config.schema import Recipe
    from ...layout import World

logger = logging.getLogger(__name__)


class MegatronGeneration:
    """The engine over `module`, which stays the owner of its parameters (colocated: the trainer's own module).

    Construction is collective over the world and leaves the engine running, at weight version 0. `host` is the address
    other ranks reach this one by; the default serves one machine.
    """

    def __init__(
        self,
        module: MegatronModule,
        recipe: Recipe,
        world: World,
        rank: int,
        *,
        vocab_size: int,
        eos_id: int,
        host: str = "127.0.0.1",
    ):
        self._module = module
        self._seed = recipe.grpo.seed
        self._version = 0
        self._num_running = 0
        self._is_paused = False
        self._is_suspended = False
        self._engine = build_engine(module, recipe, vocab_size)
        self._cache = KvCache(self._engine.context)
        self._rules = RequestRules(
            vocab_size=vocab_size, eos_id=eos_id, max_length=self._engine.context.max_sequence_length
        )
        self._host = EngineHost(
            self._engine,
            is_primary=rank == 0,
            host=host,
            num_replicas=world.dp,
            timeout_s=recipe.timeouts.refit,
        )
        self.failure = self._host.failure
        if self._host.is_primary:
            self._host.submit(self._stamp(0)).result()

    @property
    def num_running(self) -> int:
        """Requests sent to the engine and not answered yet, those whose caller gave up included."""
        return self._num_running

    async def failed(self) -> None:
        """Return never; raises RunFailed with the engine's own traceback when it dies."""
        await asyncio.shield(asyncio.wrap_future(self.failure))

    # ---- sampling (primary rank)

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        """`num_generations` completions of a prompt; callable from any event loop of the process.

        The samples are a function of (grpo.seed, weight version at the call, `request_id`) and the weights.
        Raises ConfigError for a request the engine cannot take, RunFailed when the engine dies. A cancelled call leaves
        its requests running; they count in `num_running`.
        """
        prompt = [int(token) for token in prompt_ids]
        self._rules.check(prompt, sampling, request_id)
        streams = [stream_id(self._seed, self._version, request_id, index) for index in range(num_generations)]
        work = self._complete_all(prompt, [self._rules.sampling_params(sampling, stream) for stream in streams])
        replies = await asyncio.wrap_future(self._host.submit(work))
        return [self._rules.completion(reply, len(prompt), sampling, request_id) for reply in replies]

    async def _complete_all(self, prompt: list[int], params: list[SamplingParams]) -> list[dict]:
        self._num_running += len(params)
        try:
            return await asyncio.gather(*(self._host.client.add_request(prompt, each) for each in params))
        finally:
            self._num_running -= len(params)

    # ---- control (every rank)

    async def set_version(self, version: int) -> None:
        """Stamp tokens from the next one on with `version`."""
        self._version = version
        if self._host.is_primary:  # the coordinator tells all ranks
            await self._on_loop(self._stamp(version))

    async def pause(self) -> None:
        """Stop between two steps; requests keep their state. Weights may change until `resume`. Harmless when paused.

        What was derived from the old weights goes here rather than in `resume`: a replica's other ranks may start
        stepping before their own `resume` is called, and all must find the same.
        """
        if not self._is_paused:
            await self._on_loop(self._pause())

    async def resume(self) -> None:
        """Go on after `pause`; nothing happens to an engine that is not paused."""
        if self._is_paused:
            await self._on_loop(self._resume())

    async def sleep(self) -> None:
        """Give the module to the trainer; unfinished requests keep their state. Pauses first where nobody has."""
        await self.pause()
        if not self._is_suspended:
            await self._on_loop(self._suspend())

    async def wake(self) -> None:
        """Take the module back (in evaluation mode). The engine stays paused until `resume`: set the version between
        the two, so that the first token under the new weights carries it.
        """
        if self._is_suspended:
            await self._on_loop(self._unsuspend())

    def kv_bytes(self) -> KvBytes:
        """What this rank's cache holds now, and what it has released since the engine was built."""
        return self._cache.bytes()

    def close(self) -> None:
        """Stop the engine (collective); pending requests fail. Blocks; not for use on an event loop."""
        self._host.close()

    async def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(self._host.submit(work))

    async def _pause(self) -> None:
        await self._host.signal(InferenceClient.pause_engines, EngineState.PAUSED)
        self._is_paused = True
        if self._cache.is_rebuilt:
            await self._suspend()
        prefix_cache.forget(self._engine)
        decode_cache.mark_stale(self._module)

    async def _resume(self) -> None:
        if self._is_suspended:
            await self._unsuspend()
        await self._host.signal(InferenceClient.unpause_engines, EngineState.RUNNING)
        self._is_paused = False

    async def _suspend(self) -> None:
        await self._host.signal(InferenceClient.suspend_engines, EngineState.SUSPENDED)
        self._is_suspended = True
        cache = self.kv_bytes()
        logger.info(
            "engine suspended with %d unfinished requests; cache (%s): %d bytes held, %d released",
            len(self._engine.requests), self._cache.mode, cache.held, cache.released,
        )  # fmt: skip

    async def _unsuspend(self) -> None:
        await self._host.signal(InferenceClient.resume_engines, EngineState.RESUMED)
        self._is_suspended = False

    async def _stamp(self, version: int) -> None:
        """Exact only while nothing steps: a running engine stamps a token or two late."""
        running = not self._is_paused
        if running:
            await self._host.signal(InferenceClient.pause_engines, EngineState.PAUSED)
        self._host.client.set_generation_epoch(version)
        if running:
            await self._host.signal(InferenceClient.unpause_engines, EngineState.RUNNING)
