"""Runs that save, crash and resume under random schedules, with the real stream, buffer, ledger and verdict. No time
passes and nothing is asynchronous: the driver picks what happens next.

Ablations replace the rule of `Rules` that they break.
"""

import random
from dataclasses import dataclass, field

from megatron_grpo.data.frontier import Frontier
from megatron_grpo.data.ledger import Ledger
from megatron_grpo.data.recorded import RecordedPrompts
from megatron_grpo.data.segment import RunStart
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.replay.reservations import Reservations
from megatron_grpo.types import FrontierState, Problem, TrajectoryGroup
from tests.fakes import make_group

ROW = PromptRow(token_ids=(1,), env_name="fake", problem=Problem(question="", answer=""))


class Stall(AssertionError):
    pass


class Crash(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Saved:
    step: int = 0
    data: FrontierState | None = None
    groups: tuple[TrajectoryGroup, ...] = ()
    order: object = None


class Rules:
    """What makes a resume exact. Each method is the product's way."""

    def saved_data(self, state):
        return state

    def saved_buffer(self, groups):
        return groups

    def restore_buffer(self, replay, saved):
        replay.restore(saved.groups, saved.step)

    def restore_stream(self, stream, data, held):
        stream.restore(data, held)

    def restore_reservations(self, reservations, saved):
        pass


@dataclass
class Schedule:
    seed: int
    folder: object
    rules: Rules = field(default_factory=Rules)
    num_crashes: int = 6
    num_steps: int = 12
    saved: Saved = field(default_factory=Saved)
    started: int = 0
    num_saves: int = 0
    num_restored_groups: int = 0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.num_rows = self.rng.randint(4, 30)
        self.failure_chance = self.rng.choice([0, 0, 0.1, 0.3])
        self.crash_chance = self.rng.choice([0.005, 0.02, 0.05])

    def run(self):
        """Until `num_steps` are trained and every crash is over."""
        while True:
            try:
                self._build()
                while self.step < self.num_steps:
                    self._next()
                self.ledger.close()
                return
            except Crash:
                self._tear()

    def _tear(self):
        """What a killed process had not flushed is gone, at times in the middle of a line."""
        self.ledger._file.flush()
        path, size = self.ledger._path, self.ledger._path.stat().st_size
        self.ledger.close()
        with path.open("r+b") as file:
            flushed = self.flushed.get(path, 0)
            file.truncate(max(flushed, size - self.rng.randint(0, 200)))

    def _build(self):
        rng, saved = self.rng, self.saved
        self.num_prompts = rng.randint(1, min(4, self.num_rows))
        self.max_age = rng.randint(1, 4)
        self.step = saved.step
        self.stream = PromptStream(
            [ROW] * self.num_rows,
            num_prompts_per_step=self.num_prompts,
            seed=self.seed,
            num_epochs=None,
            order=saved.order,
        )
        self.replay = ReplayBuffer(
            capacity=self.num_prompts * self.max_age * 2,
            num_prompts_per_step=self.num_prompts,
            max_age=self.max_age,
            sample_timeout_s=1,
            num_steps=self.num_steps,
        )
        held, groups = {}, saved.groups
        if saved.data is not None:
            if rng.random() < 0.25:
                self.replay.restore((), saved.step)
            else:
                self.rules.restore_buffer(self.replay, saved)
                held = dict(self.replay.held)
            self.rules.restore_stream(self.stream, saved.data, held)
        self.num_restored_groups += len(held)
        self.reservations = Reservations(
            num_prompts_per_step=self.num_prompts,
            max_age=self.max_age,
            num_steps=self.num_steps,
            start_version=saved.step,
            buffered=self.replay.held,
        )
        self.rules.restore_reservations(self.reservations, saved)
        self.groups = {group.ordinal: group for group in groups if group.ordinal in self.replay.held}
        self.running, self.save_under_way = {}, None
        self.ledger = Ledger(self.folder / "ledger", num_detailed=rng.randint(0, 3), max_segment_bytes=2000)
        self.prompts = RecordedPrompts(self.stream, self.ledger)
        self.started += 1
        self.ledger.run_started(
            RunStart(
                attempt=self.started,
                start_step=saved.step,
                cut=0 if saved.data is None else saved.data.cut,
                held=tuple(held),
                num_rows=self.stream.order.num_rows,
                num_served=self.stream.order.num_served,
            ),
            {ordinal: group.generation_version for ordinal, group in self.groups.items()},
        )
        self._remember_flush()

    def _remember_flush(self):
        self.flushed = {self.ledger._path: self.ledger._path.stat().st_size}

    def _next(self):
        if self.num_crashes and self.rng.random() < self.crash_chance:
            self.num_crashes -= 1
            raise Crash
        moves = (
            [self._train] * self._can_train() + [self._start] * self._can_start() + [self._finish] * bool(self.running)
        )
        if not moves:
            raise Stall(f"step {self.step} can never be filled: the buffer holds {self.replay.held}")
        moves += [self._save_more] if self.save_under_way or self.rng.random() < 0.2 else []
        self.rng.choice(moves)()

    def _can_start(self):
        return self.reservations.lowest_short_target() is not None

    def _start(self):
        target = self.reservations.lowest_short_target()
        prompt = self.prompts.next_prompt()
        self.reservations.reserve(prompt.ordinal, target)
        self.running[prompt.ordinal] = (self.reservations.version, target)

    def _finish(self):
        ordinal = self.rng.choice(list(self.running))
        version, target = self.running.pop(ordinal)
        if self.rng.random() < self.failure_chance:
            self.reservations.release(ordinal)
            reason = self.rng.choice(["generation_failed", "zero_variance"])
            self.prompts.settle_dropped(ordinal, reason, replace=reason == "generation_failed")
            return
        group = make_group(ordinal, version, target)
        self.ledger.generated(group)
        if self.replay.try_add(group) == "full":
            self.running[ordinal] = (version, target)
            return
        self.groups[ordinal] = group

    def _can_train(self):
        return self.replay.get_trajectories_needed(self.step, self.num_prompts, self.max_age) == 0

    def _train(self):
        sampled = self.replay.try_sample(self.step, self.num_prompts, self.max_age)
        assert sampled is not None and len(sampled.groups) == self.num_prompts
        trained = [group.ordinal for group in sampled.groups]
        self.reservations.consume(self.step, trained)
        self.prompts.settle_trained(trained)
        self.ledger.trained(self.step, trained)
        self._remember_flush()
        for ordinal in sampled.evicted:
            self.reservations.release(ordinal)
            self.prompts.put_back(ordinal)
        self.step += 1
        self.reservations.set_version(self.step)
        if self.save_under_way and self.save_under_way.get("step") != self.step:
            self.save_under_way = None  # the two reads of a save belong to one step

    def _save_more(self):
        """A save in three moves, with anything but a training step in between: stream, buffer (in any order), rename."""
        save = self.save_under_way
        if save is None:
            if self.step > self.saved.step:  # a checkpoint is never overwritten
                self.save_under_way = {"step": self.step}
            return
        missing = [part for part in ("data", "groups") if part not in save]
        if missing:
            part = self.rng.choice(missing)
            save[part] = self._read_data() if part == "data" else self._read_groups()
            return
        self.saved = Saved(order=self.stream.order, **save)
        self.num_saves += 1
        self.save_under_way = None

    def _read_data(self):
        state = self.rules.saved_data(self.stream.state())
        self.ledger.saving(self.step)
        self._remember_flush()
        return state

    def _read_groups(self):
        return self.rules.saved_buffer(tuple(self.groups[ordinal] for ordinal in self.replay.held))


# Ablations: each breaks one rule.


class FrontierInsteadOfCut(Rules):
    """Continue behind the highest trained prompt."""

    def saved_data(self, state):
        return FrontierState(cut=state.frontier, frontier=state.frontier, trained_above_cut=(), dropped_above_cut=())

    def restore_stream(self, stream, data, held):
        stream._frontier = Frontier()
        stream._frontier._next = stream._frontier._cut = data.cut
        stream._frontier._frontier = data.frontier
        for ordinal in held:
            stream._frontier._mark_pending(ordinal)


class HeldAdvancesNext(Rules):
    """Restored groups push the next ordinal behind themselves."""

    def restore_stream(self, stream, data, held):
        stream.restore(data, held)
        stream._frontier._next = max([stream._frontier._next, *(ordinal + 1 for ordinal in held)])


class ForgetTrainedAboveCut(Rules):
    def saved_data(self, state):
        return FrontierState(
            cut=state.cut,
            frontier=state.frontier,
            trained_above_cut=(),
            dropped_above_cut=state.dropped_above_cut,
            num_owed=state.num_owed,
        )


class ForgetDroppedAboveCut(Rules):
    def saved_data(self, state):
        return FrontierState(
            cut=state.cut,
            frontier=state.frontier,
            trained_above_cut=state.trained_above_cut,
            dropped_above_cut=(),
            num_owed=state.num_owed,
        )


class HandOutHeldAgain(Rules):
    """The stream is not told which prompts the buffer holds."""

    def restore_stream(self, stream, data, held):
        stream.restore(data, ())


class WatermarkOfTheBuffer(Rules):
    """Steps that the buffer holds groups of count as generated, complete or not."""

    def restore_reservations(self, reservations, saved):
        reservations._last_sampled = max([saved.step - 1, *(group.target_step for group in saved.groups)])


class KeepTooOld(Rules):
    """Groups too old for their step (a lower age bound since the save) stay in the buffer."""

    def restore_buffer(self, replay, saved):
        replay._last_sampled = saved.step - 1
        for group in saved.groups:
            replay._insert(group)
