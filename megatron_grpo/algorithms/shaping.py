"""Rewards rewritten per group before the advantages: a linear scaling and a soft penalty for overlong answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScaling:
    """Clamps to [source_min, source_max] and maps that range linearly onto [target_min, target_max]."""

    source_min: float
    source_max: float
    target_min: float
    target_max: float

    def __post_init__(self) -> None:
        if not self.source_min < self.source_max:
            raise ConfigError(
                f"grpo.reward_scaling.source_min {self.source_min} must be below source_max {self.source_max}"
            )

    def apply(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards [G] -> [G]."""
        share = (np.clip(rewards, self.source_min, self.source_max) - self.source_min) / (
            self.source_max - self.source_min
        )
        return self.target_min + share * (self.target_max - self.target_min)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongPenalty:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).

    The last `buffer_length` tokens before `max_response_length` cost linearly up to `penalty`, which is also the most:
    with maximum 100, buffer 20, penalty 1, a response of 80 tokens pays 0, of 90 pays 0.5, of 100 or more pays 1.
    """

    max_response_length: int
    buffer_length: int
    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer_length <= self.max_response_length:
            raise ConfigError(
                f"grpo.reward_shaping.overlong_buffer_length {self.buffer_length} must be between 1 and "
                f"max_response_length {self.max_response_length}"
            )

    def apply(self, rewards: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
        """Rewards [G] of responses with these token counts [G] -> [G]."""
        beyond = response_lengths - (self.max_response_length - self.buffer_length)
        return rewards - np.clip(beyond / self.buffer_length, 0.0, 1.0) * self.penalty
