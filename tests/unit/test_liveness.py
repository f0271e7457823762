"""Collector, stream and buffer together under random schedules: every run ends, with exactly P groups a step.

No time passes: the driver lets the event loop settle, then picks at random what ends next: a rollout (well or badly)
or a phase of the trainer. When nothing is left to pick and the trainer has not ended, the run is deadlocked.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.collector import TrajectoryCollector
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.errors import EndOfData
from megatron_grpo.replay import reservations
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.types import FrontierState, Problem
from tests.fakes import SteppedRollout, make_group


class Deadlock(AssertionError):
    pass


@dataclass(frozen=True, kw_only=True)
class Save:
    """What a checkpoint would hold after `step` steps."""

    step: int = 0
    data: FrontierState | None = None
    groups: tuple = ()
    trained: tuple[int, ...] = ()


@dataclass
class Simulation:
    rng: random.Random
    num_prompts: int
    max_age: int
    failures_left: int
    num_rows: int
    num_epochs: int
    max_num_steps: int
    crash_chance: float = 0.0
    failure_chance: float = 0.3  # of each group that ends, while failures are left
    refusals_left: int = 0  # groups that dynamic sampling throws away
    save: Save = field(default_factory=Save)
    num_failed: int = 0
    num_refused: int = 0
    max_in_flight: int = 0

    @property
    def num_steps(self):
        return min(self.max_num_steps, self.num_epochs * (self.num_rows // self.num_prompts))

    def run(self):
        """Returns the ordinals that were trained, in order, after any number of crashes."""
        while not asyncio.run(self._run_once()):
            pass
        return self.save.trained

    async def _run_once(self):
        self._build()
        collecting = asyncio.create_task(self.collector.run())
        training = asyncio.create_task(self._train())
        try:
            while True:
                await self._settle()
                if collecting.done():
                    collecting.result()
                if training.done():
                    training.result()
                    return True
                if self.rng.random() < self.crash_chance:
                    return False
                self._let_something_end()
        finally:
            for task in (training, collecting):
                task.cancel()
            await asyncio.gather(training, collecting, return_exceptions=True)

    def _build(self):
        self.gates = []
        self.rollout = SteppedRollout()
        row = PromptRow(token_ids=(1,), env_name="fake", problem=Problem(question="", answer=""))
        self.stream = PromptStream(
            [row] * self.num_rows, num_prompts_per_step=self.num_prompts, seed=0, num_epochs=self.num_epochs
        )
        usual = 2 * self.max_age * self.num_prompts or self.num_prompts
        self.replay = ReplayBuffer(
            capacity=self.rng.randint(1, usual),
            num_prompts_per_step=self.num_prompts,
            max_age=self.max_age,
            sample_timeout_s=3600,
            num_steps=self.num_steps,
        )
        if self.save.data is not None:
            self.replay.restore(self.save.groups, self.save.step)
            self.stream.restore(self.save.data, self.replay.held)
        self.collector = TrajectoryCollector(
            prompts=self.stream,
            rollout=self.rollout,
            replay=self.replay,
            num_prompts_per_step=self.num_prompts,
            max_age=self.max_age,
            num_steps=self.num_steps,
            max_failures=2,
            group_timeout_s=3600,
            admission=self,
            start_version=self.save.step,
            buffered=self.replay.held,
        )
        self.versions = {group.ordinal: group.generation_version for group in self.save.groups}

    async def _settle(self):
        for _ in range(12):
            await asyncio.sleep(0)
        self.max_in_flight = max(self.max_in_flight, self.collector.num_in_flight)

    def _let_something_end(self):
        choices = [("gate", gate) for gate in self.gates if not gate.done()]
        choices += [("group", ordinal) for ordinal in self.rollout.running]
        if not choices:
            raise Deadlock(f"step {self.save.step} of {self.num_steps} can never be filled")
        kind, chosen = self.rng.choice(choices)
        if kind == "gate":
            chosen.set_result(None)
        elif self.failures_left and self.rng.random() < self.failure_chance:
            self.failures_left -= 1
            self.num_failed += 1
            self.rollout.fail(chosen, RuntimeError("boom"))
        else:
            self.rollout.finish(chosen)

    def reason_to_refuse(self, group):
        """The simulation is the collector's `Admission`."""
        if not self.refusals_left or self.rng.random() > 0.3:
            return None
        self.refusals_left -= 1
        self.num_refused += 1
        return "zero_variance"

    def step_done(self, step):
        pass

    async def _phase(self):
        """A phase of the trainer, which ends when the driver says so."""
        gate = asyncio.get_running_loop().create_future()
        self.gates = [gate]
        await gate

    async def _train(self):
        try:
            while self.save.step < self.num_steps:
                await self._train_one_step(self.save.step)
        except EndOfData:
            pass

    async def _train_one_step(self, step):
        sampled = await self.replay.sample(step)
        assert len(sampled.groups) == self.num_prompts
        assert all(group.target_step == step and 0 <= group.age <= self.max_age for group in sampled.groups)
        await self._phase()
        trained = [group.ordinal for group in sampled.groups]
        await self.collector.settle(trained, sampled.evicted, step)
        await self._phase()
        async with self.collector.paused():
            if self.rng.random() < 0.5:
                await self.collector.drain()
                assert self.rollout.num_generating == 0
            await self._phase()
            await self.collector.set_version(step + 1)
        self._save(step + 1, trained)

    def _save(self, step, trained):
        self.versions |= {ordinal: version for ordinal, (_, version) in self.rollout.started.items()}
        groups = tuple(make_group(n, self.versions[n], target) for n, target in self.replay.held.items())
        self.save = Save(step=step, data=self.stream.state(), groups=groups, trained=(*self.save.trained, *trained))


def simulate(seed, *, max_age, failures, refusals=0, crash_chance=0.0):
    rng = random.Random(seed)
    num_prompts = rng.randint(1, 4)
    simulation = Simulation(
        rng=rng,
        num_prompts=num_prompts,
        max_age=max_age,
        failures_left=failures,
        refusals_left=refusals,
        num_rows=rng.randint(num_prompts, 3 * num_prompts),
        num_epochs=rng.randint(1, 8),
        max_num_steps=rng.randint(1, 8),
        crash_chance=crash_chance,
        failure_chance=rng.choice([0.05, 0.3]),
    )
    simulation.run()
    return simulation


def check(simulation):
    trained, prompts = simulation.save.trained, simulation.num_prompts
    assert len(trained) == simulation.save.step * prompts == len(set(trained))
    # Only dropped prompts can make the data end early.
    num_dropped = simulation.num_failed + simulation.num_refused
    assert simulation.save.step >= (simulation.num_steps * prompts - num_dropped) // prompts
    assert simulation.max_in_flight <= (simulation.max_age + 1) * prompts


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), max_age=st.integers(0, 3), failures=st.integers(0, 2), refusals=st.integers(0, 8)
)
def test_every_run_ends_with_full_steps_whatever_fails_or_is_refused(seed, max_age, failures, refusals):
    check(simulate(seed, max_age=max_age, failures=failures, refusals=refusals))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), max_age=st.integers(0, 3), failures=st.integers(0, 2), refusals=st.integers(0, 8)
)
def test_a_run_that_crashes_and_resumes_trains_every_prompt_once(seed, max_age, failures, refusals):
    check(simulate(seed, max_age=max_age, failures=failures, refusals=refusals, crash_chance=0.05))


def test_a_window_without_the_current_step_deadlocks_when_a_group_fails(monkeypatch):
    def without_current_step(version, last_sampled, max_age, num_steps):
        first = version + 1 if version else 0
        return range(max(first, last_sampled + 1), min(version + max_age + 1, num_steps))

    monkeypatch.setattr(reservations, "open_targets", without_current_step)

    def deadlocks(failures):
        """In how many of 20 runs; the failures come late enough for the window to have moved."""
        count = 0
        for seed in range(20):
            simulation = Simulation(
                rng=random.Random(seed),
                num_prompts=4,
                max_age=1,
                failures_left=failures,
                num_rows=20,
                num_epochs=9,
                max_num_steps=8,
                failure_chance=0.1,
            )
            try:
                simulation.run()
            except Deadlock:
                count += 1
        return count

    assert deadlocks(failures=0) == 0
    assert deadlocks(failures=2) >= 5


@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_the_largest_number_in_flight_is_reached(max_age):
    simulation = Simulation(
        rng=random.Random(1), num_prompts=4, max_age=max_age, failures_left=0, num_rows=4, num_epochs=9, max_num_steps=9
    )
    simulation.run()
    assert simulation.max_in_flight == (max_age + 1) * 4
