"""Mathematical answers compared by `math-verify`.

How an answer is taken out of a response:
1. the content of the last `\\boxed{...}` (braces balanced), when there is one;
2. otherwise what math-verify finds in the whole text: after "final answer is" and the like, else the last formula
   or number.
It counts as right when math-verify finds it equal to the expected answer (1/2 = 0.5 = \\frac12). An expected answer
that is no mathematics ("Paris") must be boxed literally.

math-verify limits its own time with `signal.alarm`, which only works in a main thread. It is switched off here: an
expression that takes for ever is ended with the worker process, at `timeouts.reward`.
"""

from __future__ import annotations

import logging
from typing import Any

from ...errors import DataError
from ...types import Problem

_OPENING = "\\boxed{"
_IMPLEMENTATION = "hf_math_verify"


class MathVerify:
    """Reward 1.0 for an equal answer, else 0.0. Problems come from a file: `data.train: {path: ...}`."""

    def __init__(self, math_verify_impl: str = _IMPLEMENTATION):
        if math_verify_impl != _IMPLEMENTATION:
            raise ValueError(f"math_verify_impl is {math_verify_impl!r}; only {_IMPLEMENTATION!r} is supported")
        import math_verify

        # It warns once per process that its time limit is off; here that is intended and bounded elsewhere.
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._parse = math_verify.parse
        self._verify = math_verify.verify

    def problems(self, split: str, num: int, seed: int) -> list[Problem]:
        raise DataError(f"the math environment generates no problems: set data.{split}.path to a JSONL or Parquet file")

    def score(self, problem: Problem, response: str) -> float:
        return 1.0 if self.is_correct(problem, response) else 0.0

    def is_correct(self, problem: Problem, response: str) -> bool:
        given = last_boxed(response)
        if given is not None and given.strip() == problem.answer.strip():
            return bool(given.strip())  # an empty box never counts, not even for an empty expected answer
        gold = self._parsed(problem.answer if _OPENING in problem.answer else f"{_OPENING}{problem.answer}}}")
        answer = self._parsed(response if given is None else f"{_OPENING}{given}}}")
        return bool(self._verify(gold, answer, timeout_seconds=None))

    def solution(self, problem: Problem) -> str:
        return f"{_OPENING}{problem.answer}}}"

    def _parsed(self, text: str) -> list[Any]:
        return self._parse(text, parsing_timeout=None)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces close, or None."""
    start = text.rfind(_OPENING)
    while start >= 0:
        content = _balanced(text, start + len(_OPENING))
        if content is not None:
            return content
        start = text.rfind(_OPENING, 0, start)
    return None


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return None
