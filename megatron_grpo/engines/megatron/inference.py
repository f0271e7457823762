"""One rank of the Megatron generation engine: samples completions, knows weight versions, sleeps and wakes.

Control calls (`set_version`, `pause`, `resume`, `sleep`, `wake`, `close`) are collective: every rank of the engine's
world makes them, in the same order, and the caller awaits all before the next. `generate` belongs to the primary rank
(rank 0), which spreads requests over the data-parallel replicas.

Weights may change while the engine is paused or asleep; cached prefixes of the old ones are gone by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer.module import MegatronModule

from ...errors import ConfigError, RunFailed
from ...types import Completion, Sampling
from . import prefix_cache
from .engine_host import EngineHost
from .engine_setup import build_engine
from .sampling import carry_stream, stream_id
from .versions import token_versions

if TYPE_CHECKING:
    from ...config.schema import Recipe
    from ...layout import World


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
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._seed = recipe.grpo.seed
        self._version = 0
        self._num_running = 0
        self._is_paused = False
        self._engine = build_engine(module, recipe, vocab_size)
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
        self._check(prompt, sampling, request_id)
        stops = frozenset((self._eos_id, *sampling.stop_token_ids))
        streams = [stream_id(self._seed, self._version, request_id, index) for index in range(num_generations)]
        work = self._complete_all(prompt, [self._sampling_params(sampling, stops, stream) for stream in streams])
        replies = await asyncio.wrap_future(self._host.submit(work))
        return [_completion(reply, len(prompt), stops, request_id) for reply in replies]

    def _check(self, prompt: list[int], sampling: Sampling, request_id: str) -> None:
        limit, problems = self._engine.context.max_sequence_length, []
        if not prompt:
            problems.append("the prompt is empty")
        if bad := [token for token in prompt if not 0 <= token < self._vocab_size]:
            problems.append(f"token {bad[0]} of the prompt lies outside the vocabulary of {self._vocab_size}")
        if sampling.max_new_tokens < 1:
            problems.append(f"max_new_tokens is {sampling.max_new_tokens}; at least 1 must be generated")
        if len(prompt) + sampling.max_new_tokens > limit:
            problems.append(
                f"{len(prompt)} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed the engine's {limit} "
                "(policy.generation.mcore_generation_config.max_model_len)"
            )
        if sampling.stop_strings:
            problems.append("stop_strings need text, which this engine does not see: use stop_token_ids")
        if problems:
            raise ConfigError([f"request {request_id}: {problem}" for problem in problems])

    def _sampling_params(self, sampling: Sampling, stops: frozenset[int], stream: int) -> SamplingParams:
        greedy = sampling.temperature == 0
        params = SamplingParams(
            temperature=1.0 if greedy else sampling.temperature,
            top_k=1 if greedy else min(sampling.top_k or 0, self._vocab_size),
            top_p=0.0 if greedy or sampling.top_p >= 1 else sampling.top_p,
            num_tokens_to_generate=sampling.max_new_tokens,
            return_log_probs=True,
            skip_prompt_log_probs=True,
            # Megatron ends a request on one id without delay and on "words" one step later; see IdTokenizer.
            termination_id=self._eos_id,
            stop_words=[str(token) for token in sorted(stops - {self._eos_id})] or None,
            detokenize_stop_sequence=True,
        )
        carry_stream(params, stream)
        return params

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
        """Stop between two steps; requests keep their state. Weights may change until `resume`.

        Cached prefixes are dropped here rather than in `resume`: a replica's other ranks may start stepping before
        their own `resume` is called, and all must find the same prefixes.
        """
        await self._on_loop(self._pause())
        self._is_paused = True

    async def resume(self) -> None:
        """Go on after `pause`; nothing happens to an engine that is not paused."""
        if not self._is_paused:
            return
        await self._on_loop(self._host.signal(InferenceClient.unpause_engines, EngineState.RUNNING))
        self._is_paused = False

    async def sleep(self) -> None:
        """Give the module to the trainer; unfinished requests keep their state. Pauses first where nobody has."""
        if not self._is_paused:
            await self.pause()
        await self._on_loop(self._host.signal(InferenceClient.suspend_engines, EngineState.SUSPENDED))

    async def wake(self) -> None:
        """Take the module back (in evaluation mode). The engine stays paused until `resume`: set the version between
        the two, so that the first token under the new weights carries it.
        """
        await self._on_loop(self._host.signal(InferenceClient.resume_engines, EngineState.RESUMED))

    def close(self) -> None:
        """Stop the engine (collective); pending requests fail. Blocks; not for use on an event loop."""
        self._host.close()

    async def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(self._host.submit(work))

    async def _pause(self) -> None:
        await self._host.signal(InferenceClient.pause_engines, EngineState.PAUSED)
        prefix_cache.invalidate(self._engine.context.kv_block_allocator)

    async def _stamp(self, version: int) -> None:
        """Exact only while nothing steps: a running engine stamps a token or two late."""
        running = not self._is_paused
        if running:
            await self._host.signal(InferenceClient.pause_engines, EngineState.PAUSED)
        self._host.client.set_generation_epoch(version)
        if running:
            await self._host.signal(InferenceClient.unpause_engines, EngineState.RUNNING)


def _completion(reply: dict[str, Any], prompt_length: int, stops: frozenset[int], request_id: str) -> Completion:
    """The engine's answer to one request, checked."""
    tokens, logprobs = reply["generated_tokens"], reply["generated_log_probs"]
    if reply["status"] != Status.COMPLETED.name:
        raise RunFailed(f"request {request_id}: the engine answered {reply['status']}: {reply['events']}")
    assert len(tokens) == len(logprobs) > 0, f"request {request_id}: {len(tokens)} tokens, {len(logprobs)} log-probs"
    return Completion(
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        token_versions=token_versions(reply["policy_epoch"], prompt_length, len(tokens)),
        finish_reason="stop" if tokens[-1] in stops else "length",
    )
