"""Groups by target step, in insertion order, with O(1) bookkeeping. Owned by `ReplayBuffer`; nothing waits here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from ..types import TrajectoryGroup


class Shelves:
    """One queue per target. The cost of a call does not depend on how many groups are held."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[TrajectoryGroup]] = {}
        self._versions: Counter[int] = Counter()  # tells without a scan whether anything can be stale
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(sorted(self._queues))

    def count(self, target_step: int) -> int:
        return len(self._queues.get(target_step, ()))

    def groups(self, target_step: int) -> tuple[TrajectoryGroup, ...]:
        return tuple(self._queues.get(target_step, ()))

    def put(self, group: TrajectoryGroup) -> None:
        self._queues.setdefault(group.target_step, deque()).append(group)
        self._versions[group.generation_version] += 1
        self._size += 1

    def remove(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Take out these groups. The head of a queue, which is what a batch is, is found at once."""
        for group in groups:
            queue = self._queues[group.target_step]
            queue.remove(group)  # groups compare by identity
            if not queue:
                del self._queues[group.target_step]
            self._versions[group.generation_version] -= 1
            if not self._versions[group.generation_version]:
                del self._versions[group.generation_version]
            self._size -= 1

    def left_over(self, target_step: int) -> Sequence[TrajectoryGroup]:
        """Groups of targets before `target_step`."""
        return [group for target, queue in self._queues.items() if target < target_step for group in queue]

    def unusable(self, target_step: int, max_age: int) -> Sequence[TrajectoryGroup]:
        """Groups too old for `target_step`, whatever their target, and groups of that step from its future.

        Other targets are looked through only when something so old exists: a collector never makes it.
        """
        oldest = max(0, target_step - max_age)
        looked_at = list(self._queues) if self._versions and min(self._versions) < oldest else [target_step]
        return [
            group
            for target in looked_at
            for group in self._queues.get(target, ())
            if group.generation_version < oldest or group.generation_version > target
        ]
