"""What an environment returned, as numbers. Nothing that is not a finite float gets past this module.

| returned for one response           | becomes                                                     |
|-------------------------------------|-------------------------------------------------------------|
| int, float, bool, 0-d or 1-element array or tensor | its value                                    |
| NaN, inf, None                      | a reward of 0.0 with `unusable` set: the sample is masked    |
| text, several numbers, other objects | RewardFailed: the group fails                               |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RewardFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A finite reward. `unusable` is what the environment said instead (None: `value` is what it said)."""

    value: float
    unusable: str | None = None


def as_number(value: Any, source: str) -> float | None:
    """One environment answer as a float, which may be NaN or infinite; None stays None.

    Raises RewardFailed naming `source`, the type or shape, when it is not one number.
    """
    if value is None:
        return None
    if isinstance(value, int):  # bool included; a Python int may exceed every float
        return _float_of_int(value)
    array = _as_array(value, source)
    if array.size != 1:
        raise RewardFailed(f"{source} returned an array of shape {list(array.shape)}; expected one number per response")
    return float(array.reshape(()))


def read_rewards(answers: Sequence[Any], num_responses: int, source: str) -> tuple[Reward, ...]:
    """One Reward per response from the list (or [B] or [B, 1] array) of a worker. RewardFailed on a wrong length."""
    if len(answers) != num_responses:
        raise RewardFailed(f"{source} returned {len(answers)} rewards for {num_responses} responses")
    return tuple(_reward(as_number(answer, source)) for answer in answers)


def _reward(number: float | None) -> Reward:
    if number is None or not math.isfinite(number):
        return Reward(value=0.0, unusable=repr(number))
    return Reward(value=number)


def _float_of_int(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _as_array(value: Any, source: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardFailed(f"{source} returned a {type(value).__name__} that is no number: {error}") from error
    if array.dtype.kind not in "biuf":
        raise RewardFailed(f"{source} returned {value!r:.80} ({type(value).__name__}); expected a number")
    return array
