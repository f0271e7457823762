"""Weights that change visibly with every version, and an owner that refits all ranks of an engine in step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch

from megatron_grpo.types import Sampling
from tests.megatron.world import Seat


class Weights:
    """Versions of a module's weights: the same function of the first ones (version 0) on every rank and shard."""

    def __init__(self, module):
        self.module = module
        self._first = [parameter.detach().clone() for parameter in module.parameters()]

    def set(self, version: int) -> None:
        with torch.no_grad():
            for index, (parameter, first) in enumerate(zip(self.module.parameters(), self._first, strict=True)):
                parameter.copy_(first * (1 + 0.3 * np.sin(version * (1 + index))))


async def nothing() -> None:
    return None


class Owner:
    """Calls the engine on every rank in step: awaits each call everywhere before the next."""

    def __init__(self, seat: Seat, engine, weights: Weights):
        self.seat, self.engine, self._weights = seat, engine, weights

    async def together(self, *operations: Callable[[], Awaitable[None]]) -> None:
        for operation in operations:
            await operation()
            await asyncio.to_thread(self._barrier)

    def _barrier(self) -> None:
        if self.seat.world.size > 1:
            torch.distributed.barrier()

    def share(self, value: Any) -> Any:
        """The primary's value on every rank."""
        box = [value]
        if self.seat.world.size > 1:
            torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, request_id: str, num_generations: int = 1
    ) -> asyncio.Task:
        """A task with the completions; None on the ranks that are not the primary."""

        async def call():
            if self.seat.rank:
                return None
            sampling = Sampling(max_new_tokens=max_new_tokens)
            return await self.engine.generate(
                prompt, num_generations=num_generations, sampling=sampling, request_id=request_id
            )

        return asyncio.create_task(call())

    def known(self) -> list[int]:
        """Tokens generated so far by each unfinished request."""
        entries = list(self.engine._engine.requests.values())
        return [sum(len(part.generated_tokens) for part in entry.record.requests) for entry in entries]

    async def until(self, num_tokens: int, num_requests: int = 1) -> None:
        """Wait until that many requests have that many tokens."""
        while len(self.known()) < num_requests or min(self.known()) < num_tokens:
            await asyncio.sleep(0.001)

    async def refit_in_flight(self, version: int, meanwhile: Callable[[], Awaitable[None]] = nothing) -> None:
        """The weights of `version` while the engine is paused; `meanwhile` runs after they have changed."""

        async def change():
            self._weights.set(version)

        await self.together(self.engine.pause, change, meanwhile)
        await self.together(lambda: self.engine.set_version(version), self.engine.resume)

    async def refit_asleep(self, version: int, meanwhile: Callable[[], Awaitable[None]] = nothing) -> None:
        """The same in the shared module of a sleeping engine."""

        async def train():
            self._weights.module.train()
            self._weights.set(version)

        await self.together(self.engine.pause, self.engine.sleep, train, meanwhile)
        await self.together(self.engine.wake, lambda: self.engine.set_version(version), self.engine.resume)
