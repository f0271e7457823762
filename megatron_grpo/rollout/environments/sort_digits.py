"""Sort the digits of a number: "876=" -> "678". Small enough to be learned from random weights in half a minute."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ...types import Problem
from .held_out import check_share, collect, draws_needed

_ENUMERATE_UP_TO = 5  # digits: 100,000 questions are listed at once, larger spaces are drawn at random


class SortDigits:
    """Own verifier with position-wise credit, so that a random model finds its first reward early."""

    def __init__(self, num_digits: int = 3, held_out_share: float = 0.2):
        if num_digits < 1:
            raise ValueError(f"num_digits is {num_digits}; it must be at least 1")
        check_share(held_out_share)
        self._num_digits = num_digits
        self._held_out_share = held_out_share

    def problems(self, split: str, num: int, seed: int) -> list[Problem]:
        draws = (_problem(digits) for digits in self._draws(split, num, random.Random(seed)))
        source = f"sort_digits with num_digits {self._num_digits}"
        return collect(draws, split=split, num=num, share=self._held_out_share, source=source)

    def _draws(self, split: str, num: int, rng: random.Random) -> Iterator[str]:
        space = 10**self._num_digits
        if self._num_digits <= _ENUMERATE_UP_TO:
            numbers = rng.sample(range(space), space)
        else:
            numbers = (rng.randrange(space) for _ in range(draws_needed(split, num, self._held_out_share)))
        for number in numbers:
            yield f"{number:0{self._num_digits}d}"

    def score(self, problem: Problem, response: str) -> float:
        """The share of positions that hold the right digit; what is too long divides by its own length.

        "678" for "678": 1; "687": 1/3; "6": 1/3; "6789": 3/4.
        """
        right = sum(given == wanted for given, wanted in zip(response, problem.answer, strict=False))
        return right / max(len(response), len(problem.answer))

    def is_correct(self, problem: Problem, response: str) -> bool:
        return response == problem.answer

    def solution(self, problem: Problem) -> str:
        return problem.answer


def _problem(digits: str) -> Problem:
    return Problem(question=f"{digits}=", answer="".join(sorted(digits)))
