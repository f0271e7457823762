"""`AsyncTrajectoryCollector`: the background rollouts in their own process, around `collector.TrajectoryCollector`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import ray

from ..collector import TrajectoryCollector
from ..config.derived import max_age
from ..config.schema import Recipe
from ..data.ledger import Ledger
from ..data.saved_prompts import SavedPrompts
from ..data.stream import PromptRow, PromptStream
from ..data.stream_state import StreamState, rows_digest
from ..interfaces import Generator, PromptSource, Tokenizer
from ..rollout.environments import blocks_in_use
from ..rollout.group import GroupRollout
from ..rollout.rewards import RewardPool
from ..rollout.transforms import admission, reward_transforms
from ..types import Collected, Sampling, ValidationResult
from ..validation import evaluate
from .actors import Held, log_to_file
from .clients import RayReplay
from .reward_worker import reward_worker_factory
from .starting import CollectorStart
from .supervision import Named


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectorSpec:
    """`ledger_dir` None: the run saves nothing and keeps no ledger."""

    recipe: Recipe
    num_steps: int
    start_version: int
    train_rows: Sequence[PromptRow]
    validation_rows: Sequence[PromptRow]
    tokenizer: Tokenizer
    log_dir: str
    ledger_dir: Path | None


@ray.remote(num_cpus=0, max_concurrency=10_000)
class AsyncTrajectoryCollector(Held):
    """Generates continuously with the current weights and pushes finished groups into the replay buffer."""

    def __init__(self, spec: CollectorSpec, replay: Named):
        log_to_file(spec.log_dir, "collector")
        recipe = spec.recipe
        self._spec = spec
        self._replay = RayReplay(replay)
        self._version = spec.start_version
        used = blocks_in_use(recipe.env, [*spec.train_rows, *spec.validation_rows])
        blocks = {name: {"target": block.target, **block.options} for name, block in used.items()}
        self._rewards = RewardPool(
            reward_worker_factory(blocks, spec.log_dir),
            {name: block.num_workers for name, block in used.items()},
            deadline_s=recipe.timeouts.reward,
        )

    async def open(self) -> None:
        """Start the reward workers."""
        await self._rewards.open()

    async def use_engine(self, generator: Generator, start: CollectorStart, *, stamps_versions: bool) -> None:
        """Get ready to collect with this engine; `stamps_versions`: see `EngineCapabilities.tracks_versions`."""
        spec, recipe = self._spec, self._spec.recipe
        self._generator = generator
        self._rollout = GroupRollout(
            self._generator,
            self._rewards,
            spec.tokenizer,
            training_sampling(recipe),
            recipe.grpo.num_generations_per_prompt,
            overlong_filtering=recipe.grpo.overlong_filtering,
            transforms=reward_transforms(recipe.grpo),
            engine_stamps_versions=stamps_versions,
        )
        prompts = self._open_prompts(start)
        self._collector = TrajectoryCollector(
            prompts=prompts,
            rollout=self._rollout,
            replay=self._replay,
            num_prompts_per_step=recipe.grpo.num_prompts_per_step,
            max_age=max_age(recipe),
            num_steps=spec.num_steps,
            max_failures=recipe.grpo.async_grpo.max_generation_failures,
            group_timeout_s=recipe.timeouts.group,
            admission=admission(recipe.grpo),
            start_version=spec.start_version,
            buffered=start.buffered,
            journal=self._ledger,
        )

    def _open_prompts(self, start: CollectorStart) -> PromptSource:
        spec, grpo = self._spec, self._spec.recipe.grpo
        stream = PromptStream(
            spec.train_rows,
            num_prompts_per_step=grpo.num_prompts_per_step,
            seed=grpo.seed,
            num_epochs=grpo.max_num_epochs,
            shuffle=spec.recipe.data.shuffle,
            order=start.order,
        )
        self._ledger: Ledger | None = None
        if spec.ledger_dir is None or start.at is None:
            return stream
        self._ledger = Ledger(spec.ledger_dir)
        self._prompts = SavedPrompts(stream, self._ledger, start.at, rows_digest=rows_digest(spec.train_rows))
        return self._prompts.source

    async def state_for(self, step: int) -> StreamState:
        """Of this moment, for checkpoint `step`."""
        return self._prompts.state_for(step)

    async def run(self) -> None:
        """Collect until cancelled; raises what ended the collector or its reward workers."""
        collecting = asyncio.ensure_future(self._collector.run())
        rewards = asyncio.ensure_future(self._rewards.failure())
        try:
            done, _ = await asyncio.wait({collecting, rewards}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            collecting.cancel()
            rewards.cancel()
            await asyncio.gather(collecting, rewards, return_exceptions=True)

    async def pause(self) -> None:
        self._collector.pause()

    async def resume(self) -> None:
        self._collector.resume()

    async def drain(self) -> None:
        await self._collector.drain()

    async def set_version(self, version: int) -> None:
        self._version = version
        await self._collector.set_version(version)

    async def settle(self, trained: Sequence[int], evicted: Sequence[int], step: int) -> None:
        await self._collector.settle(trained, evicted, step)

    async def evaluate(self) -> ValidationResult:
        return await evaluate(
            self._generator,
            self._rewards,
            self._spec.validation_rows,
            validation_sampling(self._spec.recipe),
            self._spec.tokenizer,
            self._version,
        )

    async def collected(self) -> Collected:
        collected, counts = await self._collector.collected(), asdict(self._rollout.take_counts())
        return replace(collected, counters={**collected.counters, **counts})


def training_sampling(recipe: Recipe) -> Sampling:
    generation = recipe.policy.generation
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def validation_sampling(recipe: Recipe) -> Sampling:
    generation = recipe.policy.generation
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature,
        top_p=generation.val_top_p,
        top_k=generation.val_top_k,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        stop_strings=tuple(generation.stop_strings or ()),
    )
