"""Supervised batches for the warm start: prompt + solution + eos, trained on solution and eos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import ConfigError
from ..interfaces import Environment, Tokenizer
from ..types import Problem, SupervisedBatch


def supervised_batches(
    problems: Sequence[Problem],
    environment: Environment,
    tokenizer: Tokenizer,
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    pad_multiple: int,
) -> Iterator[SupervisedBatch]:
    """`num_steps` batches of `batch_size` rows; every epoch visits the problems in a new order drawn from `seed`.

    T is the longest row of the batch, rounded up to `pad_multiple`. Raises ConfigError when the environment has no
    solutions.
    """
    examples = [_example(problem, environment, tokenizer) for problem in problems]
    if not examples:
        raise ConfigError("warm_start has no problem to learn from: data.train is empty")
    order = _endless_order(len(examples), np.random.default_rng(seed))
    for _ in range(num_steps):
        yield _batch([examples[next(order)] for _ in range(batch_size)], tokenizer.pad_id, pad_multiple)


_Example = tuple[list[int], list[int]]  # prompt ids, ids to learn


def _example(problem: Problem, environment: Environment, tokenizer: Tokenizer) -> _Example:
    try:
        solution = environment.solution(problem)
    except NotImplementedError as error:
        raise ConfigError(f"warm_start needs solutions, but {error}; remove warm_start") from error
    return tokenizer.encode_prompt(problem), [*tokenizer.encode(solution), tokenizer.eos_id]


def _endless_order(num: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(num).tolist()


def _batch(examples: Sequence[_Example], pad_id: int, pad_multiple: int) -> SupervisedBatch:
    lengths = np.array([len(prompt) + len(target) for prompt, target in examples], np.int64)
    width = -(-int(lengths.max()) // pad_multiple) * pad_multiple
    tokens = np.full((len(examples), width), pad_id, np.int64)
    loss_mask = np.zeros((len(examples), width), bool)
    for row, (prompt, target) in enumerate(examples):
        tokens[row, : lengths[row]] = prompt + target
        loss_mask[row, len(prompt) : lengths[row]] = True
    return SupervisedBatch(tokens=tokens, lengths=lengths, loss_mask=loss_mask)
