"""Which samples do not train, and why. Decisions per sample, made where the reward is known."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable

import numpy as np

from ..types import FinishReason, TrajectoryGroup

BAD_REWARD = "bad_reward"
OVERLONG = "overlong"
NO_TOKENS = "no_tokens"


def usable_reward(value: object) -> float | None:
    """The reward as a finite float; None for NaN, inf, None and whatever is not one number (text, arrays)."""
    if not isinstance(value, (numbers.Real, np.bool_)):
        return None
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond the float range
        return None
    return reward if math.isfinite(reward) else None


def mask_reason(
    *, reward: float | None, finish_reason: FinishReason, num_generated: int, overlong_filtering: bool
) -> str | None:
    """Why the whole sample is masked, None when it trains. `reward` is what `usable_reward` made of it."""
    if reward is None:
        return BAD_REWARD
    if num_generated == 0:
        return NO_TOKENS
    if overlong_filtering and finish_reason == "length":
        return OVERLONG
    return None


def count_masked(groups: Iterable[TrajectoryGroup]) -> Counter[str]:
    """How many samples are masked, by reason."""
    return Counter(
        trajectory.masked_because
        for group in groups
        for trajectory in group.trajectories
        if trajectory.masked_because is not None
    )


def is_fully_masked(group: TrajectoryGroup) -> bool:
    """No sample of the group trains: its prompt is dropped rather than trained on."""
    return all(trajectory.masked_because is not None for trajectory in group.trajectories)
