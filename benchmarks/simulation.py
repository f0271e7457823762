"""An event loop in virtual time and a generation engine that only takes time: for benchmarks of who waits for whom."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.interfaces import EngineCapabilities
from megatron_grpo.types import Completion, Sampling


class VirtualSelector(selectors.DefaultSelector):
    """Instead of waiting for the next timer it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        assert timeout is not None, "nothing is left that could happen"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


@dataclass(kw_only=True)
class SimulatedEngine:
    """Engine, generator and transfer. Every request makes a token each `token_s` while the engine is not paused;
    lengths are log-normal, cut at `max_new_tokens`.
    """

    capabilities: EngineCapabilities
    token_s: float
    transfer_s: float
    median_length: float
    sigma: float
    lengths: random.Random
    made: float = 0.0  # tokens per request since the start: only the time in which the engine runs counts
    runs_since: float | None = 0.0
    versions_from: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # (made, version)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        start = self._made()
        lengths = [self._length(sampling.max_new_tokens) for _ in range(num_generations)]
        await self._until(start + max(lengths))
        return [self._completion(start, length, sampling.max_new_tokens) for length in lengths]

    async def pause(self) -> None:
        if self.runs_since is not None:
            self.made, self.runs_since = self._made(), None
            self._tell()

    async def resume(self) -> None:
        if self.runs_since is None:
            self.runs_since = asyncio.get_running_loop().time()
            self._tell()

    async def set_version(self, version: int) -> None:
        self.versions_from.append((self._made(), version))

    async def sleep(self) -> None:
        return None

    async def wake(self) -> None:
        await self.pause()
        await asyncio.sleep(self.transfer_s)

    async def transfer(self) -> None:
        await asyncio.sleep(self.transfer_s)

    def _made(self) -> float:
        if self.runs_since is None:
            return self.made
        return self.made + (asyncio.get_running_loop().time() - self.runs_since) / self.token_s

    def _tell(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    async def _until(self, goal: float) -> None:
        """Wait until `goal` tokens were made; a pause stops the count."""
        while (left := goal - self._made()) > 1e-6:
            try:
                async with asyncio.timeout(None if self.runs_since is None else left * self.token_s):
                    await self.moved.wait()
            except TimeoutError:
                continue

    def _length(self, limit: int) -> int:
        return max(1, min(limit, round(self.lengths.lognormvariate(np.log(self.median_length), self.sigma))))

    def _completion(self, start: float, length: int, limit: int) -> Completion:
        places, versions = zip(*self.versions_from, strict=True)
        at = np.searchsorted(places, start + np.arange(length), side="right") - 1
        return Completion(
            token_ids=np.ones(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            token_versions=np.array(versions, np.int32)[at],
            finish_reason="length" if length == limit else "stop",
        )
