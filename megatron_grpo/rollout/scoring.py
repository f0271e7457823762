"""The protocol between rollouts and whoever scores responses; `rewards.RewardPool` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Problem
from .reward_values import Reward


class Scoring(Protocol):
    """Both raise RewardFailed when the environment fails, RunFailed when its worker died."""

    async def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> tuple[Reward, ...]: ...

    async def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> tuple[bool, ...]: ...
