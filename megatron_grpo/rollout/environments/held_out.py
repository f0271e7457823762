"""Training and validation questions kept apart by a stable hash, for tasks that are drawn at random.

A question belongs to one side for ever, whatever the seed, the number of rows or the Python process: the side is a
function of its text (case folded, so that "Both" and "both" never face each other across the split).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable

from ...errors import DataError
from ...types import Problem

log = logging.getLogger(__name__)

TRAIN, VALIDATION = "train", "validation"


def check_share(share: float) -> None:
    """Raise ValueError unless both sides of the split can have questions."""
    if not 0.0 < share < 1.0:
        raise ValueError(f"held_out_share is {share}; it must lie between 0 and 1, both excluded")


def is_held_out(question: str, share: float) -> bool:
    """Whether the question belongs to validation; true for about `share` of all questions."""
    digest = hashlib.sha256(question.casefold().strip().encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def draws_needed(split: str, num: int, share: float) -> int:
    """How many random draws are worth trying for `num` distinct questions: ten times the expectation, and then some."""
    side = share if split == VALIDATION else 1.0 - share
    return 1000 + round(10 * num / side)


def collect(draws: Iterable[Problem], *, split: str, num: int, share: float, source: str) -> list[Problem]:
    """`num` problems of one side, each question once.

    When `draws` ends early, training questions are repeated in the order found; validation returns what there is, since
    a repeated question would only pretend to be evidence. Raises DataError when the side has no question at all.
    """
    if split not in (TRAIN, VALIDATION):
        raise ValueError(f"split is {split!r}; it must be {TRAIN!r} or {VALIDATION!r}")
    problems = _distinct((one for one in draws if is_held_out(one.question, share) == (split == VALIDATION)), num)
    if num and not problems:
        raise DataError(f"{source} has no {split} question with held_out_share {share}; change held_out_share")
    if len(problems) >= num:
        return problems
    if split == VALIDATION:
        log.warning("%s has only %d held-out questions; %d were asked for", source, len(problems), num)
        return problems
    log.info("%s has only %d training questions; %d rows repeat them", source, len(problems), num)
    return list(itertools.islice(itertools.cycle(problems), num))


def _distinct(draws: Iterable[Problem], num: int) -> list[Problem]:
    """Up to `num` different questions; gives up when drawing brings nothing new for a long time."""
    found: dict[str, Problem] = {}
    num_repeats = 0
    for problem in draws:
        if len(found) >= num or num_repeats > 1000 + 10 * len(found):
            break
        num_repeats = num_repeats + 1 if problem.question in found else 0
        found.setdefault(problem.question, problem)
    return list(found.values())
