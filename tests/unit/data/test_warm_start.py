"""Supervised batches: the solution and its end are learned, the prompt is not."""

import numpy as np
import pytest

from megatron_grpo.data.task_tokenizer import TaskTokenizer
from megatron_grpo.data.warm_start import supervised_batches
from megatron_grpo.errors import ConfigError
from megatron_grpo.rollout.environments import SortDigits
from megatron_grpo.types import Problem
from tests.fakes import FixedEnvironment

ENVIRONMENT = SortDigits()
PROBLEMS = ENVIRONMENT.problems("train", 10, 0)
TOKENIZER = TaskTokenizer.from_problems(ENVIRONMENT.problems("train", 1000, 0))


def batches(problems=PROBLEMS, environment=ENVIRONMENT, **options):
    settings = {"num_steps": 3, "batch_size": 4, "seed": 0, "pad_multiple": 8} | options
    return list(supervised_batches(problems, environment, TOKENIZER, **settings))


def test_a_row_is_prompt_solution_eos_and_learns_solution_and_eos():
    (batch,) = batches(PROBLEMS[:1], num_steps=1, batch_size=1)
    problem = PROBLEMS[0]
    assert batch.tokens.shape == batch.loss_mask.shape == (1, 16) and batch.lengths.tolist() == [9]
    assert TOKENIZER.decode(batch.tokens[0, :9]) == f"<bos>{problem.question}{problem.answer}<eos>"
    assert TOKENIZER.decode(batch.tokens[0][batch.loss_mask[0]]) == f"{problem.answer}<eos>"
    assert (batch.tokens[0, 9:] == TOKENIZER.pad_id).all()
    assert (batch.tokens.dtype, batch.lengths.dtype, batch.loss_mask.dtype) == (np.int64, np.int64, bool)


@pytest.mark.parametrize("pad_multiple, width", [(1, 9), (2, 10), (9, 9)])
def test_rows_are_padded_to_the_multiple(pad_multiple, width):
    assert batches(pad_multiple=pad_multiple)[0].tokens.shape == (4, width)


def test_rows_of_different_lengths_share_a_batch():
    mixed = [Problem(question="12=", answer="12"), Problem(question="1=", answer="1")]
    (batch,) = batches(mixed, num_steps=1, batch_size=2, pad_multiple=1)
    assert sorted(batch.lengths.tolist()) == [5, 7] and batch.loss_mask.sum() == 5


def test_every_epoch_visits_each_problem_once_in_a_new_order():
    rows = np.concatenate([batch.tokens for batch in batches(num_steps=5)])
    epochs = [[tuple(row) for row in rows[:10]], [tuple(row) for row in rows[10:]]]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def test_the_batches_follow_from_the_seed():
    first, again, other = batches(seed=1), batches(seed=1), batches(seed=2)
    assert all((a.tokens == b.tokens).all() for a, b in zip(first, again, strict=True))
    assert any((a.tokens != b.tokens).any() for a, b in zip(first, other, strict=True))


def test_a_task_without_solutions_is_refused():
    with pytest.raises(ConfigError, match="warm_start.*no solutions"):
        batches(environment=FixedEnvironment())


def test_no_problem_is_refused():
    with pytest.raises(ConfigError, match="data.train is empty"):
        batches([])
