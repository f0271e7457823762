"""The replay buffer: groups wait here for the step they were made for.

Owns the waiting of producers and of the consumer. Must not know Ray, prompts or weights. See `ReplayBuffer` for who
waits for what.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import DeadlineExceeded, EndOfData, ReplayClosed
from ..types import Sampled, TrajectoryGroup
from .restore import Restored, clean_restored
from .shelves import Shelves
from .staleness import assert_young_enough, can_serve

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _WaitingProducer:
    group: TrajectoryGroup
    placed: asyncio.Future[None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _WaitingConsumer:
    target_step: int
    woken: asyncio.Future[None]


class ReplayBuffer:
    """Groups by target step, in insertion order. One event loop owns it; its calls never block the loop.

    ==============  ==================  =========================================  ===================================
    task            consumes            waits for                                  woken by / ends with
    ==============  ==================  =========================================  ===================================
    producer (add)  nothing             room, unless its target is the next one    `sample` places its group;
                                        to be sampled and lacks groups             `close`: ReplayClosed
    the consumer    P groups of its     P valid groups of its target               the `add` that completes the
    (sample)        target                                                         target; `close`: ReplayClosed;
                                                                                   `end_of_data`: EndOfData; deadline:
                                                                                   DeadlineExceeded
    ==============  ==================  =========================================  ===================================

    Each waiter has its own future and the call that makes room places the waiting groups itself, so that one
    operation costs the same with ten groups and with ten thousand, and no waiter is woken in vain.
    """

    def __init__(
        self, *, capacity: int, num_prompts_per_step: int, max_age: int, sample_timeout_s: float, num_steps: int
    ):
        assert capacity >= 1 and num_prompts_per_step >= 1 and max_age >= 0, (capacity, num_prompts_per_step, max_age)
        self._capacity = capacity
        self._num_prompts_per_step = num_prompts_per_step
        self._max_age = max_age
        self._sample_timeout_s = sample_timeout_s
        self._num_steps = num_steps
        self._shelves = Shelves()
        self._last_sampled = -1
        self._evicted: list[int] = []  # reported with the next batch
        self._producers: dict[int, deque[_WaitingProducer]] = {}
        self._consumer: _WaitingConsumer | None = None
        self._closed_because: str | None = None
        self._first_missing_target: int | None = None

    # What is in the buffer

    @property
    def size(self) -> int:
        return self._shelves.size

    @property
    def targets(self) -> tuple[int, ...]:
        """The steps for which groups are here, ascending."""
        return self._shelves.targets

    @property
    def last_sampled(self) -> int:
        """The last step of which a full batch was taken; -1 before the first."""
        return self._last_sampled

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        """Every group here, nearest step first, in insertion order within a step."""
        return tuple(group for target in self.targets for group in self._shelves.groups(target))

    @property
    def held(self) -> dict[int, int]:
        """Ordinal -> target step of every group here: what a collector has to know after a restore."""
        return {group.ordinal: group.target_step for group in self.groups}

    def get_trajectories_needed(self, target_step: int, num_prompts: int, max_age: int) -> int:
        """How many groups `target_step` lacks; groups that are too old for it do not count."""
        groups = self._shelves.groups(target_step)
        num_valid = sum(can_serve(group.generation_version, target_step, max_age) for group in groups)
        return max(0, num_prompts - num_valid)

    # Producers

    def try_add(self, group: TrajectoryGroup) -> Literal["success", "full"]:
        """Take the group if there is room; nothing is ever evicted for it. Raises ReplayClosed."""
        if self._closed_because is not None:
            raise ReplayClosed(self._closed_because)
        if not self._has_room(group):
            return "full"
        self._insert(group)
        return "success"

    async def add(self, group: TrajectoryGroup) -> None:
        """Add, waiting while there is no room. A cancelled `add` leaves no group behind. Raises ReplayClosed."""
        if self.try_add(group) == "success":
            return
        waiting = _WaitingProducer(group=group, placed=asyncio.get_running_loop().create_future())
        self._producers.setdefault(group.target_step, deque()).append(waiting)
        try:
            await waiting.placed
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    # The consumer

    def try_sample(self, target_step: int, num_prompts: int, max_age: int) -> Sampled | None:
        """Take the first `num_prompts` valid groups of the step, or nothing. Stale and left-over groups leave anyway;
        their ordinals come with the next batch.
        """
        self._evict(self._shelves.left_over(target_step), "their step was sampled without them")
        self._evict(self._shelves.unusable(target_step, max_age), f"too old for step {target_step} (age {max_age})")
        self._place_waiting()
        if self._shelves.count(target_step) < num_prompts:
            return None
        groups = self._shelves.groups(target_step)[:num_prompts]
        for group in groups:
            assert_young_enough(group, target_step, max_age)
        self._shelves.remove(groups)
        self._last_sampled = max(self._last_sampled, target_step)
        evicted, self._evicted = tuple(self._evicted), []
        sampled = Sampled(groups=groups, evicted=evicted, waited_s=0.0, buffer_size=self.size)
        self._place_waiting()
        return sampled

    async def sample(self, target_step: int) -> Sampled:
        """Wait for exactly P valid groups of `target_step` and take them, in insertion order.

        Raises ReplayClosed (with the cause), EndOfData, or DeadlineExceeded after `sample_timeout_s`. One at a time.
        """
        assert self._consumer is None, f"step {self._consumer.target_step} is waited for; one sample at a time"
        since, since_wall = time.monotonic(), time.strftime("%H:%M:%S")
        try:
            async with asyncio.timeout(self._sample_timeout_s):
                while (sampled := self._attempt(target_step)) is None:
                    await self._batch_or_end(target_step)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the trainer waited {self._sample_timeout_s:g} s (since {since_wall}) for "
                f"{self._num_prompts_per_step} groups of step {target_step}; the buffer holds {self._contents()}. "
                "Look for stalled generation, or raise timeouts.sample"
            ) from None
        return dataclasses.replace(sampled, waited_s=time.monotonic() - since)

    # Ends, restore

    async def close(self, cause: str) -> None:
        """End every wait, present and future, with ReplayClosed(cause). The first cause stays."""
        if self._closed_because is not None:
            return
        self._closed_because = cause
        for queue in self._producers.values():
            for waiting in queue:
                if not waiting.placed.done():
                    waiting.placed.set_exception(ReplayClosed(cause))
        self._producers.clear()
        self._wake_consumer()

    async def end_of_data(self, first_missing_target: int) -> None:
        """`sample` of this step, or of a later one that is not complete, raises EndOfData from now on.

        From here on groups close ranks: each moves to the nearest step that lacks groups, so that a failure in an
        early step, which no prompt can replace any more, costs the last step and not all from the early one on.
        """
        if self._first_missing_target is None or first_missing_target < self._first_missing_target:
            self._first_missing_target = first_missing_target
        groups = self.groups
        self._shelves.remove(groups)
        for group in groups:
            self._insert(group)
        self._place_waiting()
        self._wake_consumer()

    def restore(self, groups: Sequence[TrajectoryGroup], resume_step: int) -> Restored:
        """Start a resumed run with what of `groups` is usable; also call it with none, for `last_sampled`."""
        assert self.size == 0 and self._last_sampled == -1, "restore comes before anything is added or sampled"
        restored = clean_restored(
            groups,
            resume_step=resume_step,
            num_prompts_per_step=self._num_prompts_per_step,
            max_age=self._max_age,
            capacity=self._capacity,
        )
        self._last_sampled = resume_step - 1
        for group in restored.kept:
            self._insert(group)
        return restored

    # Inside

    def _attempt(self, target_step: int) -> Sampled | None:
        if self._closed_because is not None:
            raise ReplayClosed(self._closed_because)
        if target_step >= self._num_steps:
            raise EndOfData(f"step {target_step} is beyond the run's {self._num_steps} steps")
        sampled = self.try_sample(target_step, self._num_prompts_per_step, self._max_age)
        if sampled is None and self._first_missing_target is not None and target_step >= self._first_missing_target:
            raise EndOfData(f"the prompts are used up: step {target_step} cannot be filled")
        return sampled

    async def _batch_or_end(self, target_step: int) -> None:
        consumer = _WaitingConsumer(target_step=target_step, woken=asyncio.get_running_loop().create_future())
        self._consumer = consumer
        try:
            await consumer.woken
        finally:
            self._consumer = None

    def _wake_consumer(self) -> None:
        if self._consumer is not None and not self._consumer.woken.done():
            self._consumer.woken.set_result(None)

    def _has_room(self, group: TrajectoryGroup) -> bool:
        """Room by capacity; the next step's missing groups always fit, or the run would wait for itself."""
        if self.size < self._capacity:
            return True
        target = self._target_for(group)
        return target == self._last_sampled + 1 and self._shelves.count(target) < self._num_prompts_per_step

    def _target_for(self, group: TrajectoryGroup) -> int:
        """Its own target; after the end of the data the nearest step that lacks groups and that it can serve."""
        if self._first_missing_target is not None:
            for target in range(self._last_sampled + 1, group.generation_version + self._max_age + 1):
                fits = can_serve(group.generation_version, target, self._max_age)
                if fits and self._shelves.count(target) < self._num_prompts_per_step:
                    return target
        return group.target_step

    def _insert(self, group: TrajectoryGroup) -> None:
        target = self._target_for(group)
        if target != group.target_step:
            log.info(
                "prompt %d now serves step %d, not %d: no prompt is left", group.ordinal, target, group.target_step
            )
            group = dataclasses.replace(group, target_step=target)
        self._shelves.put(group)
        is_awaited = self._consumer is not None and self._consumer.target_step == target
        if is_awaited and self._shelves.count(target) >= self._num_prompts_per_step:
            self._wake_consumer()

    def _evict(self, groups: Sequence[TrajectoryGroup], why: str) -> None:
        if not groups:
            return
        self._shelves.remove(groups)
        self._evicted.extend(group.ordinal for group in groups)
        described = [(group.ordinal, group.generation_version, group.target_step) for group in groups]
        log.warning("evicted (prompt, version, step) %s: %s", described, why)

    def _place_waiting(self) -> None:
        """Put waiting producers' groups where room is now, nearest target first, first come first served."""
        for target in sorted(self._producers):
            queue = self._producers[target]
            while queue and self._has_room(queue[0].group):
                waiting = queue.popleft()
                if not waiting.placed.done():
                    self._insert(waiting.group)
                    waiting.placed.set_result(None)
            if not queue:
                del self._producers[target]

    def _withdraw(self, waiting: _WaitingProducer) -> None:
        """A cancelled producer's group must not stay: its prompt will be generated again."""
        ordinal, target = waiting.group.ordinal, waiting.group.target_step
        queue = self._producers.get(target, deque())
        if waiting in queue:
            queue.remove(waiting)
            return
        # It may have been placed in the same turn of the loop as the cancellation.
        self._shelves.remove([g for step in self.targets for g in self._shelves.groups(step) if g.ordinal == ordinal])
        self._place_waiting()

    def _contents(self) -> str:
        counts = ", ".join(f"{self._shelves.count(target)} of step {target}" for target in self.targets)
        return counts or "nothing"
