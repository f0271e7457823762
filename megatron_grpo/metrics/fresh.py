"""How far trainer and engine disagree on tokens of the very same weights.

On older tokens the weights differ too, so only these tell a wrong engine (or a stale cache) from staleness.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..types import ScoredBatch, TrajectoryGroup
from .values import Mean, Metric


def fresh_error(groups: Sequence[TrajectoryGroup], scored: ScoredBatch, step: int) -> dict[str, Metric]:
    """Over valid tokens whose version equals `step`, the version that scored them; d = p - g, old minus generation
    log-prob: the k3 estimate e^d - 1 - d, and e^|d|. `scored` holds the rows of `groups` in order, arrays [B, T].

    A step without such a token reports neither.
    """
    fresh = _valid(scored) & (_versions(groups, scored.old_logprobs.shape) == step)
    d = scored.old_logprobs[fresh].astype(np.float64) - scored.rollouts.generation_logprobs[fresh]
    if not len(d):
        return {}
    count = float(len(d))
    return {
        "train/gen_kl_error_fresh": Mean(sum=float(np.sum(np.expm1(d) - d)), count=count),
        "train/token_mult_prob_error_fresh": Mean(sum=float(np.sum(np.exp(np.abs(d)))), count=count),
    }


def _valid(scored: ScoredBatch) -> np.ndarray:
    return scored.rollouts.loss_mask & scored.rollouts.sample_mask[:, None]


def _versions(groups: Sequence[TrajectoryGroup], shape: tuple[int, ...]) -> np.ndarray:
    """Token versions as the batch lays out its rows, int [B, T]; -1 on prompts and padding."""
    versions = np.full(shape, -1)
    rows = (trajectory for group in groups for trajectory in group.trajectories)
    for row, trajectory in enumerate(rows):
        versions[row, : len(trajectory.token_versions)] = trajectory.token_versions
    return versions
