"""Which finished groups may enter the buffer. Pure decisions; the collector asks, drops and refills."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from ..errors import SamplingExhausted
from ..types import TrajectoryGroup

ZERO_VARIANCE, FULLY_MASKED = "zero_variance", "fully_masked"  # values of DroppedPrompt.reason


class Admission(Protocol):
    def reason_to_refuse(self, group: TrajectoryGroup) -> str | None:
        """Why the group must not be trained on; None: it is admitted. Asked once per finished group."""
        ...

    def step_done(self, step: int) -> None:
        """Nothing will be generated for `step` or earlier ones any more."""
        ...


class AdmitAll:
    """Every group trains; one without variance has advantages of exactly 0."""

    def reason_to_refuse(self, group: TrajectoryGroup) -> str | None:
        return None

    def step_done(self, step: int) -> None:
        return None


class DynamicSampling:
    """`grpo.use_dynamic_sampling`: a group that teaches nothing is refused, and its place is generated again.

    A step gets at most `max_gen_batches` x P groups, refused ones included. Raises SamplingExhausted as soon as they
    cannot hold P good ones: with P = 2 and a limit of 3, the fifth refusal is the last (at best one of six is good).
    """

    def __init__(self, *, num_prompts_per_step: int, max_gen_batches: int):
        self._num_prompts_per_step = num_prompts_per_step
        self._max_gen_batches = max_gen_batches
        self._num_refused: Counter[int] = Counter()  # by target step

    def reason_to_refuse(self, group: TrajectoryGroup) -> str | None:
        reason = lesson_missing(group)
        if reason is not None:
            self._num_refused[group.target_step] += 1
            self._check_limit(group.target_step, reason)
        return reason

    def step_done(self, step: int) -> None:
        for done in [target for target in self._num_refused if target <= step]:
            del self._num_refused[done]

    def _check_limit(self, step: int, reason: str) -> None:
        refused, limit = self._num_refused[step], self._max_gen_batches
        if refused + self._num_prompts_per_step > limit * self._num_prompts_per_step:
            raise SamplingExhausted(
                f"step {step} cannot be filled: dynamic sampling refused {refused} groups (the last: {reason}), and "
                f"grpo.dynamic_sampling_max_gen_batches = {limit} allows {limit} x {self._num_prompts_per_step} groups "
                "a step. Every reward of a group being equal teaches nothing: look at the rewards, raise that limit, "
                "or set grpo.use_dynamic_sampling=false"
            )


def lesson_missing(group: TrajectoryGroup) -> str | None:
    """Why all advantages of the group are 0: no sample of it trains, or those that do have equal rewards."""
    rewards = {trajectory.reward for trajectory in group.trajectories if trajectory.masked_because is None}
    if not rewards:
        return FULLY_MASKED
    return ZERO_VARIANCE if len(rewards) == 1 else None


def is_fully_masked(group: TrajectoryGroup) -> bool:
    """No trajectory trains: the group fills its place in a batch, but its prompt does not count as trained."""
    return len(group.trajectories) > 0 and all(item.masked_because is not None for item in group.trajectories)
