"""Any data set of the `reasoning-gym` library, scored by the library's own verifier.

The library is imported when an environment is built, not with this module: that takes more than a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError
from ...types import Problem
from .held_out import check_share, collect, draws_needed

_EXACT = 1.0


class ReasoningGym:
    """`dataset` is the library's name of it, `dataset_options` go to its configuration (`min_word_len`, ...).

    size: how many entries are drawn at most in search of distinct questions (None: derived from what is asked for).
    held_out_share: the share of questions kept for validation.
    partial_credit: false: anything below full marks scores 0 (many verifiers pay for answers that are nearly right).
    only_matching: a regular expression that a question must contain; ": [a-z]+$" keeps the words without capitals.
    """

    def __init__(
        self,
        dataset: str,
        dataset_options: Mapping[str, Any] | None = None,
        size: int | None = None,
        held_out_share: float = 0.2,
        only_matching: str | None = None,
        partial_credit: bool = True,
    ):
        check_share(held_out_share)
        if size is not None and size < 1:
            raise ValueError(f"size is {size}; it must be at least 1 or null")
        self._name = dataset
        self._options = dict(dataset_options or {})
        self._size = size
        self._partial_credit = partial_credit
        self._held_out_share = held_out_share
        self._only_matching = re.compile(only_matching or "")
        self._verifier = self._create(seed=0, size=1)

    def problems(self, split: str, num: int, seed: int) -> list[Problem]:
        size = self._size or draws_needed(split, num, self._held_out_share)
        source = f"reasoning_gym data set {self._name!r}"
        return collect(self._draws(seed, size), split=split, num=num, share=self._held_out_share, source=source)

    def _draws(self, seed: int, size: int) -> Iterator[Problem]:
        entries = self._create(seed=seed, size=size)
        for index in range(size):
            entry = entries[index]
            if self._only_matching.search(entry["question"]):
                answer = "" if entry["answer"] is None else str(entry["answer"])
                yield Problem(question=entry["question"], answer=answer, metadata={"entry": entry})

    def score(self, problem: Problem, response: str) -> float:
        marks = self._marks(problem, response)
        return marks if self._partial_credit or marks >= _EXACT else 0.0

    def is_correct(self, problem: Problem, response: str) -> bool:
        """Full marks: most verifiers give partial credit below 1."""
        return self._marks(problem, response) >= _EXACT

    def _marks(self, problem: Problem, response: str) -> float:
        return float(self._verifier.score_answer(response, problem.metadata["entry"]))

    def solution(self, problem: Problem) -> str:
        if not problem.answer:
            raise NotImplementedError(f"reasoning_gym data set {self._name!r} gives no answers, only a verifier")
        return problem.answer

    def _create(self, *, seed: int, size: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self._name, seed=seed, size=size, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"reasoning_gym cannot build the data set {self._name!r} with {self._options}: {error}"
            ) from error
