"""Background rollouts: picks a target for each prompt, starts groups, counts failures, pauses. Pure asyncio, no Ray.

==============  =======================  ==============================================  ==============================
task            consumes                 waits for                                       woken by / ends with
==============  =======================  ==============================================  ==============================
`run`           prompts, while an open   a reason to start groups                        a new version, `settle`, a
(dispatcher)    target lacks groups                                                      resume, a group that left its
                                                                                         target; ends with the first
                                                                                         failure not tolerated, or when
                                                                                         cancelled
one per group   nothing                  its rollout, then room in the buffer            its deadline; the buffer's
                                                                                         consumer; a closed buffer
`drain`         nothing                  no group generating                             the rollout; group deadlines
==============  =======================  ==============================================  ==============================

Only the event loop that runs `run` may call the methods.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from .errors import DeadlineExceeded, EndOfData, GenerationFailed
from .interfaces import Journal, Producer, PromptSource, Rollout
from .metrics import Tally
from .replay.admission import FULLY_MASKED, Admission, AdmitAll, is_fully_masked
from .replay.reservations import Reservations
from .replay.staleness import can_serve
from .types import Collected, Prompt, TrajectoryGroup

log = logging.getLogger(__name__)


class Unrecorded:
    """A `Journal` that keeps nothing."""

    def generated(self, group: TrajectoryGroup) -> None:
        return None

    def trained(self, step: int, ordinals: Sequence[int]) -> None:
        return None


class TrajectoryCollector:
    """Keeps every open target supplied with groups of the current weights.

    `max_failures` consecutive failed groups are tolerated; a success resets the count. `buffered` (ordinal -> target
    step) are groups that a restored buffer holds. `admission` refuses finished groups that must not train (None: nothing
    is refused).
    """

    def __init__(
        self,
        *,
        prompts: PromptSource,
        rollout: Rollout,
        replay: Producer,
        num_prompts_per_step: int,
        max_age: int,
        num_steps: int,
        max_failures: int,
        group_timeout_s: float,
        admission: Admission | None = None,
        start_version: int = 0,
        buffered: Mapping[int, int] | None = None,
        journal: Journal | None = None,
    ):
        self._prompts = prompts
        self._rollout = rollout
        self._replay = replay
        self._max_failures = max_failures
        self._group_timeout_s = group_timeout_s
        self._admission = admission or AdmitAll()
        self._journal = journal or Unrecorded()
        self._max_age = max_age
        self._reservations = Reservations(
            num_prompts_per_step=num_prompts_per_step,
            max_age=max_age,
            num_steps=num_steps,
            start_version=start_version,
            buffered=buffered or {},
        )
        self._groups: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._num_pauses = 0
        self._num_failures_in_a_row = 0
        self._failure: BaseException | None = None
        self._first_missing_target: int | None = None
        self._tally = Tally()
        self._fully_masked: set[int] = set()  # admitted, though nothing of them will train

    @property
    def num_in_flight(self) -> int:
        """Groups running, or buffered and not yet sampled: at most (A+1) x P."""
        return self._reservations.num_in_flight

    async def run(self) -> None:
        """Collect until cancelled; all generated, it idles. Raises GenerationFailed, or ReplayClosed when the buffer
        was closed. No group outlives it.
        """
        try:
            while self._failure is None:
                await self._announce_end_of_data(self._start_groups())
                await self._wake.wait()
                self._wake.clear()
            raise self._failure
        finally:
            await self._stop_groups()

    # What the loop says

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No group starts inside the block. Blocks may nest or overlap; the last one to end resumes."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """The first half of `paused`, for callers in another process. Every pause needs its resume."""
        self._num_pauses += 1

    def resume(self) -> None:
        assert self._num_pauses > 0, "resume without a pause"
        self._num_pauses -= 1
        self._wake.set()

    async def drain(self) -> None:
        """Wait until no group is generating; call inside `paused`. Group deadlines bound it."""
        # A task created just now has not entered its rollout yet and would not be counted: let it, in one turn.
        await asyncio.sleep(0)
        await self._rollout.wait_drained()

    async def set_version(self, version: int) -> None:
        """Groups that start from now on are generated by `version`."""
        self._reservations.set_version(version)
        self._wake.set()

    async def settle(self, trained: Sequence[int], evicted: Sequence[int], step: int) -> None:
        """Step `step` consumed the groups of these prompts; evicted ones will be generated again."""
        self._reservations.consume(step, trained)
        masked = self._fully_masked.intersection(trained)
        learnt = [ordinal for ordinal in trained if ordinal not in masked]
        self._prompts.settle_trained(learnt)
        self._journal.trained(step, learnt)
        for ordinal in sorted(masked):
            self._drop(ordinal, FULLY_MASKED, replace=False)
        self._fully_masked.difference_update(masked, evicted)
        self._admission.step_done(step)
        for ordinal in evicted:
            self._give_back(ordinal)
        self._wake.set()

    async def collected(self) -> Collected:
        """What was counted and dropped since the last call, and the groups in flight now."""
        return self._tally.take(num_groups_in_flight=self.num_in_flight)

    # Starting

    def _start_groups(self) -> int | None:
        """Start all groups that may start now. Returns the target that the data cannot fill any more, if any."""
        while not self._num_pauses:
            target = self._reservations.lowest_short_target()
            if target is None:
                return None
            try:
                prompt = self._prompts.next_prompt()
            except EndOfData:
                self._reservations.close_ranks()
                return self._reservations.lowest_short_target()
            self._start(prompt, target)
        return None

    def _start(self, prompt: Prompt, target: int) -> None:
        self._reservations.reserve(prompt.ordinal, target)
        task = asyncio.create_task(self._collect(prompt, target, self._reservations.version))
        self._groups.add(task)
        task.add_done_callback(partial(self._group_ended, prompt.ordinal))

    async def _announce_end_of_data(self, target: int | None) -> None:
        if target is not None and (self._first_missing_target is None or target < self._first_missing_target):
            self._first_missing_target = target
            log.info("no prompt is left: step %d cannot be filled", target)
            await self._replay.end_of_data(target)

    # One group

    async def _collect(self, prompt: Prompt, target: int, version: int) -> None:
        try:
            group = await self._generate(prompt, target, version)
        except Exception as error:  # noqa: BLE001 - whatever a worker raises is counted, or ends the run
            self._group_failed(prompt.ordinal, target, error)
            return
        self._num_failures_in_a_row = 0
        # An unfit group would never be sampled, and its step would wait for ever.
        got, asked = (group.ordinal, group.target_step), (prompt.ordinal, target)
        assert got == asked, f"the rollout returned (prompt, step) {got} when asked for {asked}"
        assert can_serve(group.generation_version, target, self._max_age), (
            f"the rollout of prompt {prompt.ordinal} returned version {group.generation_version}, started with "
            f"{version}; it cannot serve step {target} at a largest age of {self._max_age}"
        )
        self._tally.finished(group)
        self._journal.generated(group)
        reason = self._admission.reason_to_refuse(group)
        if reason is not None:
            self._tally.refused()
            self._drop(prompt.ordinal, reason, replace=False)
            return
        if is_fully_masked(group):
            self._fully_masked.add(prompt.ordinal)
        await self._replay.add(group)

    async def _generate(self, prompt: Prompt, target: int, version: int) -> TrajectoryGroup:
        since = time.strftime("%H:%M:%S")
        try:
            async with asyncio.timeout(self._group_timeout_s) as deadline:
                return await self._rollout.run_group(prompt, target_step=target, generation_version=version)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(
                f"the group of prompt {prompt.ordinal} (step {target}) was not finished after "
                f"{self._group_timeout_s:g} s (since {since}); timeouts.group sets this deadline"
            ) from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled this task: an engine dropped the request. Started again in silence it would loop.
            raise RuntimeError(f"the request of prompt {prompt.ordinal} was cancelled by the engine") from error

    def _group_failed(self, ordinal: int, target: int, error: Exception) -> None:
        self._num_failures_in_a_row += 1
        self._tally.failed()
        message = (
            f"the group of prompt {ordinal} (step {target}) failed: {type(error).__name__}: {error}\n"
            f"{self._num_failures_in_a_row} in a row, and grpo.async_grpo.max_generation_failures tolerates "
            f"{self._max_failures}"
        )
        if self._num_failures_in_a_row > self._max_failures:
            failure = GenerationFailed(f"{message}\n{''.join(traceback.format_exception(error))}")
            failure.__cause__ = error
            self._give_back(ordinal)
            self._fail(failure)
            return
        log.warning("%s: its prompt is dropped, another takes its place", message, exc_info=error)
        self._drop(ordinal, "generation_failed", replace=True)

    def _drop(self, ordinal: int, reason: str, *, replace: bool) -> None:
        """The prompt is not trained; the place it may still hold in its target is free. `replace`: `PromptStream`."""
        self._reservations.release(ordinal)
        self._prompts.settle_dropped(ordinal, reason, replace=replace)
        self._tally.dropped(ordinal, reason)
        self._wake.set()

    def _group_ended(self, ordinal: int, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        if task.cancelled():
            self._give_back(ordinal)
            self._wake.set()
        elif (error := task.exception()) is not None:
            self._give_back(ordinal)
            self._fail(error)

    # Ends

    def _give_back(self, ordinal: int) -> None:
        """The prompt is neither trained nor dropped: it is generated again, its place in its target is free."""
        self._reservations.release(ordinal)
        self._prompts.put_back(ordinal)

    def _fail(self, error: BaseException) -> None:
        """The first failure is the one that `run` raises; later ones are its consequences."""
        if self._failure is None:
            self._failure = error
        self._wake.set()

    async def _stop_groups(self) -> None:
        groups = list(self._groups)
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
