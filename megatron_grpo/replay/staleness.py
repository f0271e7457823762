"""Which steps a group may serve, and which steps may be generated for now. Knows no buffer and no clock.

A = `max_age`. Version v of the generator has finished steps 0 .. v-1; an up-to-date generator holds v = s right
before step s. Synchronous GRPO is A = 0: the window is the one step {v}.
"""

from __future__ import annotations

from ..types import TrajectoryGroup


def open_targets(version: int, last_sampled: int, max_age: int, num_steps: int) -> range:
    """The steps that groups started with `version` may be reserved for, nearest first.

    The current step belongs to the window: when one of its groups fails, only the current weights can replace it.
    Example, A = 1: version 10, last sampled 9 -> 10, 11; once step 10 was sampled -> 11.
    """
    return range(max(version, last_sampled + 1), min(version + max_age + 1, num_steps))


def can_serve(generation_version: int, target_step: int, max_age: int) -> bool:
    """Whether a group of this version is young enough for the step, and not from its future.

    Example, A = 1: version 10 serves the steps 10 and 11, and is too old for 12.
    """
    return max(0, target_step - max_age) <= generation_version <= target_step


def assert_young_enough(group: TrajectoryGroup, target_step: int, max_age: int) -> None:
    """The age bound, where the trainer consumes: no token older than it, none from the step's future.

    The group's own version counts too: it is never younger than its oldest token.
    """
    stamps = [trajectory.token_versions[trajectory.loss_mask] for trajectory in group.trajectories]
    oldest = min((int(versions.min()) for versions in stamps if len(versions)), default=group.generation_version)
    newest = max((int(versions.max()) for versions in stamps if len(versions)), default=group.generation_version)
    oldest = min(oldest, group.generation_version)
    assert can_serve(oldest, target_step, max_age) and newest <= target_step, (
        f"prompt {group.ordinal}: tokens of versions {oldest} to {newest} cannot serve step {target_step}, "
        f"the largest age is {max_age}"
    )
