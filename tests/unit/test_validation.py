"""Held-out evaluation: greedy grades, bounded concurrency, and which failures end it."""

import asyncio
import logging

import pytest

from megatron_grpo.data.stream import PromptRow
from megatron_grpo.errors import RewardFailed, RunFailed
from megatron_grpo.rollout.reward_values import Reward
from megatron_grpo.types import Problem, Sampling
from megatron_grpo.validation import evaluate
from tests.fakes import CharacterTokenizer, EchoGenerator, make_completion

GREEDY = Sampling(max_new_tokens=4, temperature=0.0, stop_token_ids=(1,))


class CopyTask:
    """Full marks for repeating the question; questions that start with "!" make the verifier fail."""

    async def score(self, env_name, problem, responses):
        if problem.question.startswith("!"):
            raise RewardFailed("env boom")
        unusable = "nan" if problem.question == "?" else None
        return tuple(Reward(value=float(self._same(problem, one)), unusable=unusable) for one in responses)

    async def is_correct(self, env_name, problem, responses):
        return tuple(self._same(problem, response) for response in responses)

    def _same(self, problem, response):
        return response == problem.question


def rows(*questions):
    return [
        PromptRow(token_ids=tuple(map(ord, question)), env_name="copy", problem=Problem(question=question, answer=""))
        for question in questions
    ]


def upper(prompt_ids):
    return [make_completion([*(ord(chr(token).upper()) for token in prompt_ids), 1])]


def grade(*questions, generator=None, **options):
    generator = generator or EchoGenerator(upper)
    return asyncio.run(evaluate(generator, CopyTask(), rows(*questions), GREEDY, CharacterTokenizer(), 7, **options))


def test_accuracy_and_mean_reward_are_over_all_prompts():
    result = grade("A", "b", "CC", "DD")
    assert (result.version, result.num_samples, result.accuracy, result.mean_reward) == (7, 4, 0.75, 0.75)
    assert result.mean_length == 2.5 and result.seconds >= 0


def test_every_generation_of_a_prompt_is_a_sample():
    generator = EchoGenerator(lambda prompt_ids: upper(prompt_ids) + [make_completion([1])])
    result = grade("A", "B", generator=generator, num_generations=2)
    assert (result.num_samples, result.accuracy) == (4, 0.5)


def test_no_more_prompts_run_at_once_than_allowed():
    generator = EchoGenerator(upper)
    grade(*"ABCDEFGH", generator=generator, max_concurrency=3)
    assert generator.most_running == 3 and len(set(generator.request_ids)) == 8


def test_one_failed_verifier_counts_as_wrong_and_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        result = grade("A", "!")
    assert (result.num_samples, result.accuracy) == (2, 0.5)
    assert "1 of 2" in caplog.text and "env boom" in caplog.text


def test_a_verifier_that_always_fails_is_raised():
    with pytest.raises(RewardFailed, match="env boom"):
        grade("!", "!!")


def test_an_unusable_reward_is_not_correct():
    assert grade("?", "A").accuracy == 0.5


def test_a_dead_engine_ends_the_evaluation_with_its_own_error():
    def dead(prompt_ids):
        raise RunFailed("generation worker 0 died")

    with pytest.raises(RunFailed, match="generation worker 0"):
        grade("A", "B", generator=EchoGenerator(dead))


def test_no_prompt_gives_an_empty_result():
    assert (grade().num_samples, grade().accuracy) == (0, 0.0)
