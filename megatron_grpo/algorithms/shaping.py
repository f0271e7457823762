"""Rewards of a group rewritten before the advantages: a linear scaling and a soft penalty for overlong answers.

Pure, per group, the same in sync and async. `config.rules` refuses ranges that make no sense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RewardTransform(Protocol):
    def apply(self, rewards: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
        """Rewards float64 [G] of responses with these token counts [G] -> [G]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScaling:
    """Clamps to [source_min, source_max] and maps that range linearly onto [target_min, target_max]."""

    source_min: float
    source_max: float
    target_min: float
    target_max: float

    def __post_init__(self) -> None:
        assert self.source_min < self.source_max, f"empty source range {self.source_min} .. {self.source_max}"

    def apply(self, rewards: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
        width = self.source_max - self.source_min
        share = (np.clip(rewards, self.source_min, self.source_max) - self.source_min) / width
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
        assert 0 < self.buffer_length <= self.max_response_length, (self.buffer_length, self.max_response_length)

    def apply(self, rewards: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
        beyond = response_lengths - (self.max_response_length - self.buffer_length)
        return rewards - np.clip(beyond / self.buffer_length, 0.0, 1.0) * self.penalty
