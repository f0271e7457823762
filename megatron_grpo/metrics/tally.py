"""What the collector counts between two reports. Owned by the collector; no waiting."""

from __future__ import annotations

from collections import Counter

from ..types import Collected, DroppedPrompt, TrajectoryGroup
from .step import has_mixed_versions

_COUNTED = (
    "num_groups",
    "num_failed_groups",
    "num_refused_groups",
    "num_trajectories",
    "num_masked_trajectories",
    "num_truncated_trajectories",
    "num_mixed_version_trajectories",
    "num_generated_tokens",
)


class Tally:
    """Sums under the names of `_COUNTED`, and the dropped prompts by ordinal."""

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._dropped: list[DroppedPrompt] = []

    def finished(self, group: TrajectoryGroup) -> None:
        """A group was generated and scored, whether or not it is admitted."""
        counted = self._counted
        counted["num_groups"] += 1
        counted["num_trajectories"] += len(group.trajectories)
        for trajectory in group.trajectories:
            counted["num_generated_tokens"] += trajectory.num_generated
            counted["num_masked_trajectories"] += trajectory.masked_because is not None
            counted["num_truncated_trajectories"] += trajectory.finish_reason == "length"
            counted["num_mixed_version_trajectories"] += has_mixed_versions(trajectory)

    def failed(self) -> None:
        self._counted["num_failed_groups"] += 1

    def refused(self) -> None:
        self._counted["num_refused_groups"] += 1

    def dropped(self, ordinal: int, reason: str) -> None:
        self._dropped.append(DroppedPrompt(ordinal=ordinal, reason=reason))

    def take(self, *, num_groups_in_flight: int) -> Collected:
        """Everything since the last call, and the groups in flight now."""
        counters = {name: float(self._counted[name]) for name in _COUNTED}
        counters["num_groups_in_flight"] = float(num_groups_in_flight)
        collected = Collected(counters=counters, dropped=tuple(self._dropped))
        self._counted.clear()
        self._dropped.clear()
        return collected
