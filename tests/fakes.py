"""Small stand-ins with the real interfaces, shared by the tests. Append; keep each at 10-30 lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from megatron_grpo.batching.pack import build_rollouts
from megatron_grpo.collector import TrajectoryCollector
from megatron_grpo.metrics import StepMetrics, step_metrics
from megatron_grpo.rollout.rewards import RewardHost
from megatron_grpo.types import (
    Completion,
    FinishReason,
    Problem,
    Prompt,
    RolloutBatch,
    Sampling,
    ScoredBatch,
    TrainBatch,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
)


def make_prompt(ordinal: int) -> Prompt:
    problem = Problem(question=f"question {ordinal}", answer=str(ordinal))
    return Prompt(ordinal=ordinal, token_ids=(1, 2), env_name="fake", problem=problem)


def make_group(
    ordinal: int, generation_version: int, target_step: int, trajectories: tuple[Trajectory, ...] = ()
) -> TrajectoryGroup:
    return TrajectoryGroup(
        ordinal=ordinal,
        prompt=make_prompt(ordinal),
        trajectories=trajectories,
        generation_version=generation_version,
        target_step=target_step,
    )


def make_trajectory(versions: list[int], *, masked_because: str | None = None, finish: str = "stop") -> Trajectory:
    """One prompt token, then one generated token per entry of `versions`."""
    num_tokens = 1 + len(versions)
    return Trajectory(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.array([False] + [True] * len(versions)),
        generation_logprobs=np.zeros(num_tokens, dtype=np.float32),
        token_versions=np.array([-1, *versions], dtype=np.int32),
        reward=0.0,
        finish_reason=finish,
        masked_because=masked_because,
    )


class SteppedRollout:
    """A `Rollout` whose groups end when the test says so: `finish(ordinal)` or `fail(ordinal, error)`."""

    def __init__(self) -> None:
        self.running: dict[int, asyncio.Future[TrajectoryGroup]] = {}
        self.started: dict[int, tuple[int, int]] = {}  # ordinal -> (target step, generation version)
        self._drained = asyncio.Event()

    async def run_group(self, prompt: Prompt, *, target_step: int, generation_version: int) -> TrajectoryGroup:
        self.started[prompt.ordinal] = (target_step, generation_version)
        self.running[prompt.ordinal] = asyncio.get_running_loop().create_future()
        self._drained.clear()
        try:
            return await self.running[prompt.ordinal]
        finally:
            del self.running[prompt.ordinal]
            if not self.running:
                self._drained.set()

    def finish(self, ordinal: int, trajectories: tuple[Trajectory, ...] = ()) -> None:
        target, version = self.started[ordinal]
        self.running[ordinal].set_result(make_group(ordinal, version, target, trajectories))

    def fail(self, ordinal: int, error: Exception) -> None:
        self.running[ordinal].set_exception(error)

    @property
    def num_generating(self) -> int:
        return len(self.running)

    async def wait_drained(self) -> None:
        if self.running:
            await self._drained.wait()


class CharacterTokenizer:
    """A `Tokenizer` whose ids are code points; 0 pads, 1 ends."""

    vocab_size, eos_id, pad_id = 0x110000, 1, 0

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)

    def encode_prompt(self, problem: Problem) -> list[int]:
        return self.encode(problem.question)


def make_completion(token_ids: Sequence[int], *, version: int = 0, finish: FinishReason = "stop") -> Completion:
    num = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(num, -0.5, np.float32),
        token_versions=np.full(num, version, np.int32),
        finish_reason=finish,
    )


class EchoGenerator:
    """A `Generator` that answers each prompt with what `answers` maps its ids to, once `release` is set."""

    def __init__(self, answers: Callable[[tuple[int, ...]], list[Completion]]):
        self._answers = answers
        self.release = asyncio.Event()
        self.release.set()
        self.request_ids: list[str] = []
        self.num_running = self.most_running = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        self.request_ids.append(request_id)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            await self.release.wait()
            return self._answers(tuple(prompt_ids))
        finally:
            self.num_running -= 1


class HostedRewardWorker:
    """A `RewardWorker` in this process. `hang` makes calls wait; `die(reason)` ends it as a crash would."""

    def __init__(self, name: str, host: RewardHost):
        self.name = name
        self.hang = False
        self.was_killed = False
        self._host = host
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> Sequence[object]:
        await (asyncio.Event().wait() if self.hang else asyncio.sleep(0))
        return self._host.score(env_name, problem, responses)

    async def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> Sequence[bool]:
        await (asyncio.Event().wait() if self.hang else asyncio.sleep(0))
        return self._host.is_correct(env_name, problem, responses)

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._death)

    def die(self, reason: str) -> None:
        self._death.set_result(reason)

    async def kill(self) -> None:
        self.was_killed = True


class FixedEnvironment:
    """An `Environment` whose reward is what the response reads as Python, or the error it names."""

    def __init__(self, options: str = ""):
        self.options = options

    def problems(self, split: str, num: int, seed: int) -> list[Problem]:
        return [Problem(question=f"{split} {seed} {index}", answer=str(index)) for index in range(num)]

    def score(self, problem: Problem, response: str) -> float:
        if response.startswith("raise "):
            raise ValueError(response.removeprefix("raise "))
        return eval(response, {"nan": np.nan, "inf": np.inf, "array": np.array})

    def is_correct(self, problem: Problem, response: str) -> bool:
        return response == problem.answer

    def solution(self, problem: Problem) -> str:
        raise NotImplementedError("this task has no solutions")


class EnvironmentWithoutSolution:
    problems = score = is_correct = lambda self: None


class EnvironmentThatCannotStart(FixedEnvironment):
    def __init__(self):
        raise OSError("no such file: words.txt")


def score_alike(groups: Sequence[TrajectoryGroup], old_logprobs: np.ndarray | None = None) -> ScoredBatch:
    """The batch of `groups` as a trainer would score it that agrees with the engine, or with these log-probs [B, T]."""
    rollouts = build_rollouts(groups, pad_id=0)
    old = rollouts.generation_logprobs if old_logprobs is None else old_logprobs
    return ScoredBatch(rollouts=rollouts, old_logprobs=old, reference_logprobs=None)


class LocalCollector(TrajectoryCollector):
    """The loop's `Collector` in this process: the real one, with what its actor adds."""

    @asynccontextmanager
    async def collecting(self):
        running = asyncio.create_task(self.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def evaluate(self):
        raise NotImplementedError("these runs are not validated")


class IdleTrainer:
    """A `Trainer` and `Batcher` that agrees with the engine, learns nothing and takes `num_turns` turns a step."""

    def __init__(self, num_turns: int = 0):
        self._num_turns = num_turns

    def rollouts(self, groups: Sequence[TrajectoryGroup]) -> RolloutBatch:
        return build_rollouts(groups, pad_id=0)

    def updates(self, scored: ScoredBatch) -> list[TrainBatch]:
        return []

    async def score(self, rollouts: RolloutBatch) -> ScoredBatch:
        return ScoredBatch(rollouts=rollouts, old_logprobs=rollouts.generation_logprobs, reference_logprobs=None)

    async def train(self, updates: Sequence[TrainBatch]) -> TrainResult:
        for _ in range(self._num_turns):
            await asyncio.sleep(0)
        return TrainResult(metrics={}, num_updates=1, learning_rate=0.0)


class KeptReports:
    """A `Reporter` that keeps the records of the steps."""

    def __init__(self) -> None:
        self.records: list[StepMetrics] = []

    def step(self, step, *, sampled, scored, trained, collected, clock) -> None:
        self.records.append(
            step_metrics(
                step=step, sampled=sampled, scored=scored, trained=trained, seconds=clock.lap(), collected=collected
            )
        )

    def validated(self, step, result) -> None:
        raise NotImplementedError
