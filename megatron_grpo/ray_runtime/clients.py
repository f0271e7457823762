"""The protocols of `interfaces` over actor handles. Every error leaves as ours, naming the actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import ray

from ..batching.shard import gather_rows, shard_rollouts, shard_update
from ..data.stream_state import StreamState
from ..errors import RunFailed, WeightSyncFailed
from ..interfaces import EngineCapabilities, Generator
from ..types import (
    Collected,
    Completion,
    RolloutBatch,
    Sampled,
    Sampling,
    ScoredBatch,
    SupervisedBatch,
    TrainBatch,
    TrainResult,
    TrajectoryGroup,
    ValidationResult,
)
from .calls import Call, Deadline, answers_within
from .starting import CollectorStart
from .supervision import Named, answer

log = logging.getLogger(__name__)


async def all_answers(actors: Sequence[Named], method: str, *args: Any) -> list[Any]:
    """Call `method` on every actor at once: their collectives meet. The first failure is raised."""
    calls = [answer(actor, getattr(actor.handle, method).remote(*args)) for actor in actors]
    return list(await asyncio.gather(*calls))


class RayReplay:
    """`Replay` and `Producer` over the buffer actor."""

    def __init__(self, actor: Named):
        self._actor = actor

    async def sample(self, target_step: int) -> Sampled:
        call = self._actor.handle.sample.remote(target_step)
        try:
            return await answer(self._actor, call)
        except asyncio.CancelledError:
            ray.cancel(call)
            raise

    async def add(self, group: TrajectoryGroup) -> None:
        await answer(self._actor, self._actor.handle.add.remote(group))

    async def close(self, cause: str) -> None:
        await answer(self._actor, self._actor.handle.close.remote(cause))

    async def end_of_data(self, first_missing_target: int) -> None:
        await answer(self._actor, self._actor.handle.end_of_data.remote(first_missing_target))


class RayGenerator:
    """`Generator` over the engine's primary rank, which spreads requests over its replicas."""

    def __init__(self, primary: Named):
        self._primary = primary

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        call = self._primary.handle.generate.remote(tuple(prompt_ids), num_generations, sampling, request_id)
        return await answer(self._primary, call)


class RayEngine:
    """`Engine` over all ranks of the Megatron engine. Each call ends within `deadline`, whatever becomes of a rank."""

    def __init__(self, ranks: Sequence[Named], *, colocated: bool, deadline: Deadline):
        self._ranks = ranks
        self._deadline = deadline
        self.capabilities = EngineCapabilities(
            pauses_in_flight=True,
            must_drain=False,
            blocks_training=colocated,
            wake_carries_weights=colocated,
            tracks_versions=True,
        )

    async def _all(self, method: str, *args: Any) -> None:
        await answers_within(self._deadline, [Call(actor=rank, method=method, args=args) for rank in self._ranks])

    async def set_version(self, version: int) -> None:
        await self._all("set_version", version)

    async def pause(self) -> None:
        await self._all("pause")

    async def resume(self) -> None:
        await self._all("resume")

    async def sleep(self) -> None:
        await self._all("sleep")

    async def wake(self) -> None:
        await self._all("wake")


class RayWeightTransfer:
    """`WeightTransfer`: both sides enter together; either side's failure is the transfer's."""

    def __init__(self, policy: Sequence[Named], generation: Sequence[Named], *, deadline: Deadline):
        self._deadline = deadline
        self._calls = [Call(actor=rank, method="send_weights") for rank in policy]
        self._calls += [Call(actor=rank, method="receive_weights") for rank in generation]

    async def transfer(self) -> None:
        try:
            await answers_within(self._deadline, self._calls)
        except WeightSyncFailed:
            raise
        except RunFailed as error:
            raise WeightSyncFailed(f"the weights did not reach the engine: {error}") from error


class RayPolicyRanks:
    """`backends.PolicyRanks` over the policy ranks."""

    def __init__(self, ranks: Sequence[Named]):
        self._ranks = ranks

    async def call(self, function: Callable[..., Any], *args: Any) -> Sequence[Any]:
        return await all_answers(self._ranks, "call_with_module", function, *args)


class RayTrainer:
    """`Trainer` over the policy ranks: each data-parallel rank gets its rows, representatives answer."""

    def __init__(self, ranks: Sequence[Named], dp_of_rank: Sequence[int], dp_size: int):
        self._ranks = ranks
        self._dp_of_rank = dp_of_rank
        self._dp_size = dp_size

    async def _each(self, method: str, shards: Sequence[Any], *same: Any) -> list[Any]:
        """One call per rank with its shard; the representatives' answers in data-parallel order."""
        stored = [ray.put(shard) for shard in shards]
        calls = [
            answer(actor, getattr(actor.handle, method).remote(stored[dp], *same))
            for actor, dp in zip(self._ranks, self._dp_of_rank, strict=True)
        ]
        answers = await asyncio.gather(*calls)
        by_dp = {dp: value for dp, value in zip(self._dp_of_rank, answers, strict=True) if value is not None}
        return [by_dp[dp] for dp in range(self._dp_size)]

    async def score(self, rollouts: RolloutBatch) -> ScoredBatch:
        scores = await self._each("score", shard_rollouts(rollouts, self._dp_size))
        width = rollouts.tokens.shape[1]
        place = partial(gather_rows, lengths=rollouts.lengths, width=width)
        has_reference = scores[0].reference_logprobs is not None
        return ScoredBatch(
            rollouts=rollouts,
            old_logprobs=place([score.old_logprobs for score in scores]),
            reference_logprobs=place([score.reference_logprobs for score in scores]) if has_reference else None,
        )

    async def train(self, updates: Sequence[TrainBatch]) -> TrainResult:
        by_update = [shard_update(update, self._dp_size) for update in updates]
        results = await self._each("train", list(zip(*by_update, strict=True)))
        return results[0]

    async def warm_start(self, batches: Sequence[SupervisedBatch], lr: float) -> list[float]:
        """Supervised steps on all ranks; the losses in order."""
        return (await self._each("warm_start", [batches] * self._dp_size, lr))[0]

    async def finish_warm_start(self) -> None:
        await all_answers(self._ranks, "finish_warm_start")


class RayCollector:
    """`Collector` over its actor."""

    def __init__(self, actor: Named, replay: RayReplay):
        self._actor = actor
        self._replay = replay

    async def _call(self, method: str, *args: Any) -> Any:
        return await answer(self._actor, getattr(self._actor.handle, method).remote(*args))

    async def use_engine(self, generator: Generator, start: CollectorStart, *, stamps_versions: bool) -> None:
        """Before `collecting`: what generates, whether it stamps its tokens, and from where the prompts go on."""
        call = self._actor.handle.use_engine.remote(generator, start, stamps_versions=stamps_versions)
        await answer(self._actor, call)

    async def state_for(self, step: int) -> StreamState:
        """`PromptStore` of checkpoints."""
        return await self._call("state_for", step)

    @asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        running = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._call("run")
        except RunFailed as error:
            log.error("the collector ended: %s", error)
            await self._replay.close(str(error))

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        await self._call("pause")
        try:
            yield
        finally:
            await self._call("resume")

    async def drain(self) -> None:
        await self._call("drain")

    async def set_version(self, version: int) -> None:
        await self._call("set_version", version)

    async def settle(self, trained: Sequence[int], evicted: Sequence[int], step: int) -> None:
        await self._call("settle", tuple(trained), tuple(evicted), step)

    async def evaluate(self) -> ValidationResult:
        return await self._call("evaluate")

    async def collected(self) -> Collected:
        return await self._call("collected")
