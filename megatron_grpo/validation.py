"""Held-out evaluation on one weight version. Knows neither the collector nor the loop: someone pauses, then calls.

| task    | waits for                             | ends                                                       |
|---------|---------------------------------------|------------------------------------------------------------|
| sample  | one of the places, engine, reward worker | a grade; the first fatal error cancels all others        |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from .data.stream import PromptRow
from .errors import RewardFailed
from .interfaces import Generator, Tokenizer
from .rollout.completions import response_text
from .rollout.scoring import Scoring
from .types import Completion, Sampling, ValidationResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grade:
    reward: float
    is_correct: bool
    num_tokens: int
    failure: RewardFailed | None = None


async def evaluate(
    generator: Generator,
    rewards: Scoring,
    prompts: Sequence[PromptRow],
    sampling: Sampling,
    tokenizer: Tokenizer,
    version: int,
    *,
    num_generations: int = 1,
    max_concurrency: int = 64,
) -> ValidationResult:
    """Sample every prompt `num_generations` times and grade each response.

    A prompt whose environment fails (error, time-out) counts as wrong with reward 0 and is logged; when all fail, the
    environment is broken and its RewardFailed is raised. Engine errors are raised as they are.
    """
    started = time.monotonic()
    places = asyncio.Semaphore(max_concurrency)

    async def grade(index: int, row: PromptRow) -> list[_Grade]:
        async with places:
            completions = await generator.generate(
                row.token_ids,
                num_generations=num_generations,
                sampling=sampling,
                request_id=f"validation-{version}-{index}",
            )
            responses = [response_text(completion, tokenizer, sampling) for completion in completions]
            return await _graded(rewards, row, completions, responses)

    per_prompt = await _all_or_first_error([grade(index, row) for index, row in enumerate(prompts)])
    grades = [one for graded in per_prompt for one in graded]
    _report_failures(grades, version)
    return _summary(grades, version, time.monotonic() - started)


async def _all_or_first_error[T](work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error cancels the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _graded(
    rewards: Scoring, row: PromptRow, completions: Sequence[Completion], responses: Sequence[str]
) -> list[_Grade]:
    lengths = [len(completion.token_ids) for completion in completions]
    try:
        scores = await rewards.score(row.env_name, row.problem, responses)
        correct = await rewards.is_correct(row.env_name, row.problem, responses)
    except RewardFailed as failure:
        return [_Grade(reward=0.0, is_correct=False, num_tokens=length, failure=failure) for length in lengths]
    return [
        _Grade(reward=score.value, is_correct=right and score.unusable is None, num_tokens=length)
        for score, right, length in zip(scores, correct, lengths, strict=True)
    ]


def _report_failures(grades: Sequence[_Grade], version: int) -> None:
    failures = [grade.failure for grade in grades if grade.failure is not None]
    if failures and len(failures) == len(grades):
        raise failures[0]
    if failures:
        log.warning(
            "validation of version %d: %d of %d responses could not be scored and count as wrong; the first: %s",
            version, len(failures), len(grades), failures[0],
        )  # fmt: skip


def _summary(grades: Sequence[_Grade], version: int, seconds: float) -> ValidationResult:
    num = len(grades)
    return ValidationResult(
        version=version,
        accuracy=sum(grade.is_correct for grade in grades) / max(num, 1),
        mean_reward=sum(grade.reward for grade in grades) / max(num, 1),
        num_samples=num,
        mean_length=sum(grade.num_tokens for grade in grades) / max(num, 1),
        seconds=seconds,
    )
