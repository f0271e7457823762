"""One prompt -> one trajectory group: generate, score, mask. Token ids are carried, never decoded and encoded again.

| task           | waits for                     | woken by                | ends                                      |
|----------------|-------------------------------|-------------------------|-------------------------------------------|
| `run_group`    | the engine, then the verifier | their answers           | a group; their errors; cancelled any time |
| `wait_drained` | no group generating           | the last one that ended | at once when none is                      |
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..algorithms.shaping import RewardTransform
from ..interfaces import Generator, Tokenizer
from ..types import Completion, Prompt, Sampling, Trajectory, TrajectoryGroup
from .completions import check_completions, response_text
from .counts import BAD_REWARD, OVERLONG, RolloutCounts, count_group
from .reward_values import Reward
from .scoring import Scoring

log = logging.getLogger(__name__)

_MAX_ATTEMPTS_KNOWN = 100_000  # far more than can come again: what is older was trained


class GroupRollout:
    """Implements `interfaces.Rollout`. `overlong_filtering` masks completions that were cut off at their length;
    `transforms` rewrite the usable rewards, in order. Where `engine_stamps_versions` is false every token counts as old
    as its group: its start is all that is known.
    """

    def __init__(
        self,
        generator: Generator,
        rewards: Scoring,
        tokenizer: Tokenizer,
        sampling: Sampling,
        num_generations: int,
        *,
        overlong_filtering: bool = False,
        transforms: Sequence[RewardTransform] = (),
        engine_stamps_versions: bool = True,
    ):
        self._generator = generator
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._num_generations = num_generations
        self._overlong_filtering = overlong_filtering
        self._transforms = tuple(transforms)
        self._engine_stamps_versions = engine_stamps_versions
        self._num_generating = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._attempts: dict[int, int] = {}  # of the last prompts
        self._counts = RolloutCounts()

    async def run_group(self, prompt: Prompt, *, target_step: int, generation_version: int) -> TrajectoryGroup:
        """Raises BadCompletion, RewardFailed, or what the engine raised; nothing is counted for a failed group."""
        with self._generating():
            completions = await self._generate(prompt, target_step)
        if not self._engine_stamps_versions:
            completions = [_stamped(completion, generation_version) for completion in completions]
        responses = [response_text(completion, self._tokenizer, self._sampling) for completion in completions]
        rewards = await self._rewards.score(prompt.env_name, prompt.problem, responses)
        _log_unusable(prompt, rewards)
        rewards = self._transformed(rewards, completions)
        trajectories = tuple(
            self._trajectory(prompt, completion, reward)
            for completion, reward in zip(completions, rewards, strict=True)
        )
        group = TrajectoryGroup(
            ordinal=prompt.ordinal,
            prompt=prompt,
            trajectories=trajectories,
            generation_version=_oldest_version(generation_version, completions),
            target_step=target_step,
        )
        self._counts += count_group(group)
        return group

    @property
    def num_generating(self) -> int:
        return self._num_generating

    async def wait_drained(self) -> None:
        while self._num_generating:
            await self._drained.wait()

    def take_counts(self) -> RolloutCounts:
        """What was finished since the last call."""
        counts, self._counts = self._counts, RolloutCounts()
        return counts

    @contextmanager
    def _generating(self) -> Iterator[None]:
        self._num_generating += 1
        self._drained.clear()
        try:
            yield
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self._drained.set()

    async def _generate(self, prompt: Prompt, target_step: int) -> list[Completion]:
        request_id = f"prompt-{prompt.ordinal}-step-{target_step}-{self._next_attempt(prompt.ordinal)}"
        completions = await self._generator.generate(
            prompt.token_ids, num_generations=self._num_generations, sampling=self._sampling, request_id=request_id
        )
        check_completions(completions, self._num_generations, f"prompt {prompt.ordinal}")
        return completions

    def _next_attempt(self, ordinal: int) -> int:
        """A prompt may come again (evicted as stale, regenerated), a request id may not. Counted per prompt: ids seed
        the sampling, so that a resumed run must give a prompt the id that it would have had.
        """
        attempt = self._attempts.pop(ordinal, 0)
        self._attempts[ordinal] = attempt + 1
        if len(self._attempts) > _MAX_ATTEMPTS_KNOWN:
            del self._attempts[next(iter(self._attempts))]
        return attempt

    def _transformed(self, rewards: Sequence[Reward], completions: Sequence[Completion]) -> list[Reward]:
        values = np.array([reward.value for reward in rewards], np.float64)
        lengths = np.array([len(completion.token_ids) for completion in completions])
        for transform in self._transforms:
            values = transform.apply(values, lengths)
        return [
            reward if reward.unusable is not None else Reward(value=float(value))
            for reward, value in zip(rewards, values, strict=True)
        ]

    def _trajectory(self, prompt: Prompt, completion: Completion, reward: Reward) -> Trajectory:
        num_prompt, num_new = len(prompt.token_ids), len(completion.token_ids)
        return Trajectory(
            token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int32), completion.token_ids]).astype(np.int32),
            loss_mask=np.arange(num_prompt + num_new) >= num_prompt,
            generation_logprobs=np.concatenate([np.zeros(num_prompt), completion.logprobs]).astype(np.float32),
            token_versions=np.concatenate([np.full(num_prompt, -1), completion.token_versions]).astype(np.int32),
            reward=reward.value,
            finish_reason=completion.finish_reason,
            masked_because=self._masked_because(completion, reward),
        )

    def _masked_because(self, completion: Completion, reward: Reward) -> str | None:
        if reward.unusable is not None:
            return BAD_REWARD
        if self._overlong_filtering and completion.finish_reason == "length":
            return OVERLONG
        return None


def _stamped(completion: Completion, version: int) -> Completion:
    return dataclasses.replace(completion, token_versions=np.full(len(completion.token_ids), version, np.int32))


def _oldest_version(generation_version: int, completions: Sequence[Completion]) -> int:
    """The version at the group's start, or an older one that the engine stamped on a token."""
    oldest = [int(completion.token_versions.min()) for completion in completions if len(completion.token_versions)]
    return min([generation_version, *oldest])


def _log_unusable(prompt: Prompt, rewards: Sequence[Reward]) -> None:
    for index, reward in enumerate(rewards):
        if reward.unusable is not None:
            log.warning(
                "environment %r gave completion %d of prompt %d (%.80r) the reward %s: the sample is masked",
                prompt.env_name, index, prompt.ordinal, prompt.problem.question, reward.unusable,
            )  # fmt: skip
