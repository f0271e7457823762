"""What one step reports, under the public metric names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..types import (
    Collected,
    DroppedPrompt,
    Sampled,
    ScoredBatch,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
    ValidationResult,
)
from .fresh import fresh_error
from .values import Max, Mean, Metric, Sum, to_floats

REWARD = "train/reward"
LOSS = "train/loss"
AGE = "train/avg_trajectory_age"
TOKENS_PER_S = "performance/generated_tokens_per_s"
WAITED = "timing/train/wait_for_groups"
STEP_TIME = "timing/train/total_step_time"
ACCURACY = "val:accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One record of `metrics.jsonl`.

    `num_finished_steps` counts steps as a reader of a chart does and equals the weight version and the N of `step_N`:
    the 0-based step s is recorded as s + 1, and 0 is the validation before the first step. `dropped` lists the prompts
    that were given up while the step was collected.
    """

    num_finished_steps: int
    values: Mapping[str, float]
    dropped: tuple[DroppedPrompt, ...] = ()

    def with_validation(self, result: ValidationResult) -> StepMetrics:
        """The same record with the held-out evaluation of the weights that this step made."""
        return replace(self, values={**self.values, **validation_metrics(result)})

    @classmethod
    def of_validation(cls, result: ValidationResult) -> StepMetrics:
        """A record of a validation alone: the one before the first step."""
        return cls(num_finished_steps=result.version, values=validation_metrics(result))


def group_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, Metric]:
    """What the rollouts of a step tell. The reward averages over unmasked trajectories only."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    ages = [group.age for group in groups]
    lengths = [trajectory.num_generated for trajectory in trajectories]
    return {
        REWARD: Mean.of(item.reward for item in trajectories if item.masked_because is None),
        AGE: Mean.of(ages),
        "train/max_trajectory_age": Max(value=max(ages)),
        "train/min_trajectory_age": Max(value=min(ages)),
        "train/mixed_version_fraction": Mean.of(has_mixed_versions(item) for item in trajectories),
        "train/masked_share": Mean.of(item.masked_because is not None for item in trajectories),
        "train/truncated_share": Mean.of(item.finish_reason == "length" for item in trajectories),
        "train/mean_generated_length": Mean.of(lengths),
        "train/num_generated_tokens": Sum(value=sum(lengths)),
        **token_age_metrics(groups),
    }


def token_age_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, Metric]:
    """Shares of the valid tokens by age: target step minus the version that produced the token.

    Names `train/token_age_0`, `_1`, ... up to the oldest, `train/max_token_age`. Nothing valid: no names.
    """
    by_group = [group.target_step - _valid_versions(group) for group in groups]
    ages = np.concatenate(by_group) if by_group else np.zeros(0, np.int64)
    if not len(ages):
        return {}
    shares: dict[str, Metric] = {
        f"train/token_age_{age}": Mean(sum=float(count), count=float(len(ages)))
        for age, count in enumerate(np.bincount(ages))
    }
    return {**shares, "train/max_token_age": Max(value=int(ages.max()))}


def has_mixed_versions(trajectory: Trajectory) -> bool:
    """Its tokens come from more than one weight version."""
    versions = trajectory.token_versions[trajectory.loss_mask]
    return len(versions) > 0 and bool((versions != versions[0]).any())


def _valid_versions(group: TrajectoryGroup) -> np.ndarray:
    valid = [item.token_versions[item.loss_mask] for item in group.trajectories if item.masked_because is None]
    return np.concatenate(valid).astype(np.int64) if valid else np.zeros(0, np.int64)


def step_metrics(
    *,
    step: int,
    sampled: Sampled,
    scored: ScoredBatch,
    trained: TrainResult,
    seconds: Mapping[str, float],
    collected: Collected,
) -> StepMetrics:
    """Put one step together. `step` is 0-based, `seconds` a lap of the step's clock."""
    total_s = sum(seconds.values())
    values = to_floats(group_metrics(sampled.groups) | fresh_error(sampled.groups, scored, step))
    num_tokens = values["train/num_generated_tokens"]
    values |= {f"train/{name}": value for name, value in trained.metrics.items()}
    values |= {
        "train/learning_rate": trained.learning_rate,
        "train/num_updates": trained.num_updates,
        "train/buffer_size": sampled.buffer_size,
        "train/num_evicted_groups": len(sampled.evicted),
        STEP_TIME: total_s,
        WAITED: sampled.waited_s,
        TOKENS_PER_S: num_tokens / total_s if total_s else 0.0,
        "efficiency/waiting_share": sampled.waited_s / total_s if total_s else 0.0,
    }
    values |= {f"timing/train/{cause}": spent for cause, spent in seconds.items()}
    values |= {f"collector/{name}": value for name, value in collected.counters.items()}
    return StepMetrics(num_finished_steps=step + 1, values=values, dropped=collected.dropped)


def validation_metrics(result: ValidationResult) -> dict[str, float]:
    return {
        ACCURACY: result.accuracy,
        "val:reward": result.mean_reward,
        "val:num_samples": result.num_samples,
        "val:mean_generated_length": result.mean_length,
        "timing/validation/total": result.seconds,
    }
