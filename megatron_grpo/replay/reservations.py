"""Which group is meant for which step, from its start until its step is sampled. Owned by the collector; no waiting.

A prompt's reservation covers its group while it generates, while it waits to enter the buffer, and while it lies there:
it counts once throughout. So no target ever gets more than P groups, and at most (A+1) x P are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .staleness import open_targets


class Reservations:
    """Per target the ordinals that will fill it. Every operation is O(1) or O(A), whatever is in flight.

    `buffered` (ordinal -> target) are the groups that lie in the buffer already, after a restore.
    """

    def __init__(
        self,
        *,
        num_prompts_per_step: int,
        max_age: int,
        num_steps: int,
        start_version: int,
        buffered: Mapping[int, int],
    ):
        self._num_prompts_per_step = num_prompts_per_step
        self._max_age = max_age
        self._num_steps = num_steps
        self._version = start_version
        self._last_sampled = start_version - 1
        self._target_of: dict[int, int] = {}
        self._ordinals: dict[int, set[int]] = {}
        for ordinal, target in buffered.items():
            self.reserve(ordinal, target)

    @property
    def num_in_flight(self) -> int:
        """Groups that are running, or buffered and not yet sampled."""
        return sum(len(ordinals) for target, ordinals in self._ordinals.items() if target > self._last_sampled)

    @property
    def version(self) -> int:
        return self._version

    def lowest_short_target(self) -> int | None:
        """The nearest open step that lacks groups; None when the window is full."""
        for target in self._open_targets():
            if len(self._ordinals.get(target, ())) < self._num_prompts_per_step:
                return target
        return None

    def reserve(self, ordinal: int, target: int) -> None:
        assert ordinal not in self._target_of, f"prompt {ordinal} is in flight for step {self._target_of[ordinal]}"
        self._put(ordinal, target)
        limit = (self._max_age + 1) * self._num_prompts_per_step
        assert self.num_in_flight <= limit, f"{self.num_in_flight} groups in flight, the limit is {limit}"

    def release(self, ordinal: int) -> None:
        """The group was trained, failed, was cancelled or evicted. Harmless when it was released before."""
        target = self._target_of.pop(ordinal, None)
        if target is not None:
            self._ordinals[target].discard(ordinal)
            if not self._ordinals[target]:
                del self._ordinals[target]

    def set_version(self, version: int) -> None:
        """Weights `version` exist, hence every step below it was sampled."""
        assert version >= self._version, f"the version went back from {self._version} to {version}"
        self._version = version
        self._last_sampled = max(self._last_sampled, version - 1)

    def consume(self, step: int, trained: Iterable[int]) -> None:
        """Step `step` was sampled: it and the earlier ones need nothing any more."""
        self._last_sampled = max(self._last_sampled, step)
        for ordinal in trained:
            self.release(ordinal)

    def close_ranks(self) -> None:
        """No prompt is left: what is in flight fills the nearest steps, so that only the last one falls short.

        The buffer does the same with the groups (`ReplayBuffer.end_of_data`).
        """
        ordinals = sorted(self._target_of, key=lambda ordinal: self._target_of[ordinal])
        self._target_of.clear()
        self._ordinals.clear()
        first = self._open_targets().start
        for place, ordinal in enumerate(ordinals):
            self._put(ordinal, first + place // self._num_prompts_per_step)

    def _open_targets(self) -> range:
        return open_targets(self._version, self._last_sampled, self._max_age, self._num_steps)

    def _put(self, ordinal: int, target: int) -> None:
        self._target_of[ordinal] = target
        self._ordinals.setdefault(target, set()).add(ordinal)
