"""What finished groups add up to, beyond the collector's own counts of groups, trajectories and tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..replay.admission import lesson_missing
from ..types import TrajectoryGroup

OVERLONG, BAD_REWARD = "overlong", "bad_reward"  # values of Trajectory.masked_because


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCounts:
    """Sums over finished groups."""

    num_bad_rewards: int = 0  # NaN, inf or None from the environment
    num_overlong: int = 0  # masked because they were cut off at their length
    num_empty_completions: int = 0
    num_zero_variance_groups: int = 0  # nothing to learn from: all rewards that train are equal, or none trains
    max_generated_tokens: int = 0  # of one trajectory

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        mine, theirs = asdict(self), asdict(other)
        sums = {name: mine[name] + theirs[name] for name in mine}
        sums["max_generated_tokens"] = max(self.max_generated_tokens, other.max_generated_tokens)
        return RolloutCounts(**sums)


def count_group(group: TrajectoryGroup) -> RolloutCounts:
    """The counts of one finished group."""
    trajectories = group.trajectories
    masks = [trajectory.masked_because for trajectory in trajectories]
    lengths = [trajectory.num_generated for trajectory in trajectories]
    return RolloutCounts(
        num_bad_rewards=masks.count(BAD_REWARD),
        num_overlong=masks.count(OVERLONG),
        num_empty_completions=lengths.count(0),
        num_zero_variance_groups=int(lesson_missing(group) is not None),
        max_generated_tokens=max(lengths, default=0),
    )
