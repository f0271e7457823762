"""What a long tail costs: in-flight weight updates against draining, with the engine of its own and shared GPUs.

    python -m benchmarks.tail [--steps 60] [--sigma 1.0]

The real collector, buffer, rollouts, weight-sync strategies and loop; only the engine and the trainer are simulated,
on an event loop whose clock jumps to the next event, so that an hour of training takes a second. Lengths are
log-normal (median 500 tokens, cut at 8192); a token takes 20 ms whatever else runs, one step of training 30 s, moving
the weights 2 s. Tokens are simulated ten at a time.

    refit wait     seconds a step from asking the engine to stand still until it does
    trainer idle   share of the run in which the trainer neither scored nor trained
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.simulation import SimulatedEngine, VirtualLoop
from megatron_grpo.batching.pack import build_rollouts
from megatron_grpo.checkpoint.saving import NoCheckpoints
from megatron_grpo.collector import TrajectoryCollector
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.interfaces import EngineCapabilities, WeightSync
from megatron_grpo.loop import Run, async_grpo_train
from megatron_grpo.metrics import Stopwatch, group_metrics, to_floats
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.rollout.group import GroupRollout
from megatron_grpo.rollout.reward_values import Reward
from megatron_grpo.stopping import StopRequest
from megatron_grpo.types import (
    Collected,
    Problem,
    RolloutBatch,
    Sampled,
    Sampling,
    ScoredBatch,
    TrainBatch,
    TrainResult,
    TrajectoryGroup,
    ValidationResult,
)
from megatron_grpo.weight_sync.choose import choose_weight_sync

NUM_PROMPTS, NUM_GENERATIONS, MAX_AGE = 16, 8, 1
TRAIN_S, TRANSFER_S = 30.0, 2.0
TOKEN_S, MEDIAN_LENGTH, MAX_LENGTH = 0.2, 50, 819  # of ten tokens
SHARES_GPUS = EngineCapabilities(
    pauses_in_flight=True, must_drain=False, blocks_training=True, wake_carries_weights=True, tracks_versions=True
)
OWN_GPUS = replace(SHARES_GPUS, blocks_training=False, wake_carries_weights=False)


@dataclass(kw_only=True)
class Watch:
    """Notes when the trainer works and how long the engine takes to stand still."""

    busy_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    oldest: float = 0.0


class WatchedTrainer:
    def __init__(self, watch: Watch):
        self._watch = watch

    def rollouts(self, groups: Sequence[TrajectoryGroup]) -> RolloutBatch:
        return build_rollouts(groups, pad_id=0)

    def updates(self, scored: ScoredBatch) -> list[TrainBatch]:
        return []

    async def score(self, rollouts: RolloutBatch) -> ScoredBatch:
        return ScoredBatch(rollouts=rollouts, old_logprobs=rollouts.generation_logprobs, reference_logprobs=None)

    async def train(self, updates: Sequence[TrainBatch]) -> TrainResult:
        await asyncio.sleep(TRAIN_S)
        self._watch.busy_s += TRAIN_S
        return TrainResult(metrics={}, num_updates=1, learning_rate=0.0)


class WatchedReports:
    def __init__(self, watch: Watch):
        self._watch = watch

    def step(
        self,
        step: int,
        *,
        sampled: Sampled,
        scored: ScoredBatch,
        trained: TrainResult,
        collected: Collected,
        clock: Stopwatch,
    ) -> None:
        values = to_floats(group_metrics(sampled.groups))
        self._watch.mixed.append(values["train/mixed_version_fraction"])
        self._watch.oldest = max(self._watch.oldest, values["train/max_token_age"])

    def validated(self, step: int, result: ValidationResult) -> None:
        return None


class WatchedCollector(TrajectoryCollector):
    """Plays the loop's `Collector`; a drain is what a refit waits for."""

    watch: Watch

    @asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def drain(self) -> None:
        began = asyncio.get_running_loop().time()
        await super().drain()
        self.watch.waits_s.append(asyncio.get_running_loop().time() - began)

    async def evaluate(self) -> ValidationResult:
        raise NotImplementedError


class CoinRewards:
    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> tuple[Reward, ...]:
        return tuple(Reward(value=float(index % 2)) for index in range(len(responses)))


class OneWord:
    vocab_size, eos_id, pad_id = 2, 0, 0

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def encode_prompt(self, problem: Problem) -> list[int]:
        return [1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    refit_wait_s: float
    longest_wait_s: float
    idle_share: float
    step_s: float
    mixed_share: float
    oldest: float


def build(num_steps: int, engine: SimulatedEngine, watch: Watch) -> tuple[ReplayBuffer, WatchedCollector]:
    row = PromptRow(token_ids=(1,), env_name="coin", problem=Problem(question="", answer=""))
    replay = ReplayBuffer(
        capacity=2 * MAX_AGE * NUM_PROMPTS,
        num_prompts_per_step=NUM_PROMPTS,
        max_age=MAX_AGE,
        sample_timeout_s=1e9,
        num_steps=num_steps,
    )
    collector = WatchedCollector(
        prompts=PromptStream([row] * 1024, num_prompts_per_step=NUM_PROMPTS, seed=0, num_epochs=None),
        rollout=GroupRollout(engine, CoinRewards(), OneWord(), Sampling(max_new_tokens=MAX_LENGTH), NUM_GENERATIONS),
        replay=replay,
        num_prompts_per_step=NUM_PROMPTS,
        max_age=MAX_AGE,
        num_steps=num_steps,
        max_failures=0,
        group_timeout_s=1e9,
    )
    collector.watch = watch
    return replay, collector


async def train(num_steps: int, capabilities: EngineCapabilities, *, in_flight: bool, sigma: float) -> Figures:
    engine = SimulatedEngine(
        capabilities=capabilities,
        token_s=TOKEN_S,
        transfer_s=TRANSFER_S,
        median_length=MEDIAN_LENGTH,
        sigma=sigma,
        lengths=random.Random(0),
    )
    watch = Watch()
    replay, collector = build(num_steps, engine, watch)
    sync: WeightSync = choose_weight_sync(collector=collector, engine=engine, transfer=engine, in_flight=in_flight)
    trainer = WatchedTrainer(watch)
    await async_grpo_train(
        Run(
            start_step=0,
            num_steps=num_steps,
            replay=replay,
            collector=collector,
            weight_sync=sync,
            trainer=trainer,
            batcher=trainer,
            reporter=WatchedReports(watch),
            validation_due=lambda finished: False,
            checkpoints=NoCheckpoints(),
            stop=StopRequest(),
        )
    )
    total_s = asyncio.get_running_loop().time()
    waits = watch.waits_s or [0.0]
    return Figures(
        refit_wait_s=statistics.mean(waits),
        longest_wait_s=max(waits),
        idle_share=1 - watch.busy_s / total_s,
        step_s=total_s / num_steps,
        mixed_share=statistics.mean(watch.mixed),
        oldest=watch.oldest,
    )


def measure(num_steps: int, capabilities: EngineCapabilities, *, in_flight: bool, sigma: float) -> Figures:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(train(num_steps, capabilities, in_flight=in_flight, sigma=sigma))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the lengths; 0: all are equal")
    arguments = parser.parse_args()
    print("placement   mode        refit wait s (longest)   trainer idle   s per step   mixed versions   oldest token")
    for placement, capabilities in (("own GPUs", OWN_GPUS), ("shared", SHARES_GPUS)):
        for mode in ("drain", "in flight"):
            figures = measure(arguments.steps, capabilities, in_flight=mode == "in flight", sigma=arguments.sigma)
            print(
                f"{placement:10}  {mode:10}  {figures.refit_wait_s:12.1f} ({figures.longest_wait_s:6.1f})"
                f"   {figures.idle_share:14.1%}   {figures.step_s:10.1f}   {figures.mixed_share:14.1%}"
                f"   {figures.oldest:12.0f}"
            )


if __name__ == "__main__":
    main()
