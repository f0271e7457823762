"""The loop against recording fakes: order of the phases, both ends of a run, and failures."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from megatron_grpo.checkpoint.saving import NoCheckpoints
from megatron_grpo.errors import EndOfData, ReplayClosed
from megatron_grpo.loop import Run, async_grpo_train
from megatron_grpo.stopping import StopRequest
from megatron_grpo.types import Collected, Sampled, TrainResult, ValidationResult
from tests.fakes import make_group


class Recorder:
    """Plays every collaborator of the loop and writes down what was called."""

    def __init__(self, *, fails_at=None, data_ends_at=None):
        self.calls = []
        self.fails_at = fails_at
        self.data_ends_at = data_ends_at

    async def sample(self, target_step):
        if target_step == self.data_ends_at:
            raise EndOfData("no prompts left")
        if target_step == self.fails_at:
            raise ReplayClosed("worker 3: out of memory")
        self.calls.append(f"sample {target_step}")
        return Sampled(groups=(), evicted=(7,), waited_s=0.0, buffer_size=0)

    @asynccontextmanager
    async def training_window(self):
        self.calls.append("window opens")
        yield
        self.calls.append("window closes")

    async def publish(self, version):
        self.calls.append(f"publish {version}")

    async def score(self, rollouts):
        self.calls.append("score")

    async def train(self, updates):
        self.calls.append("train")
        return TrainResult(metrics={}, num_updates=1, learning_rate=0.0)

    def rollouts(self, groups):
        return groups

    def updates(self, scored):
        return []

    @asynccontextmanager
    async def collecting(self):
        self.calls.append("collecting")
        try:
            yield
        finally:
            self.calls.append("collector stopped")

    @asynccontextmanager
    async def paused(self):
        self.calls.append("pause")
        yield
        self.calls.append("resume")

    async def settle(self, trained, evicted, step):
        self.calls.append(f"settle {step} evicted {list(evicted)}")

    async def evaluate(self):
        self.calls.append("evaluate")
        return ValidationResult(version=0, accuracy=0.5, mean_reward=0.5, num_samples=1, mean_length=1.0, seconds=0.0)

    async def collected(self):
        return Collected(counters={})

    def step(self, step, *, sampled, scored, trained, collected, clock):
        self.calls.append(f"report {step}")

    def validated(self, step, result):
        self.calls.append(f"validated {step}")


def train(
    recorder,
    *,
    start_step=0,
    num_steps=2,
    validation_due=lambda finished: False,
    checkpoints=None,
    stop=None,
):
    run = Run(
        start_step=start_step,
        num_steps=num_steps,
        replay=recorder,
        collector=recorder,
        weight_sync=recorder,
        trainer=recorder,
        batcher=recorder,
        reporter=recorder,
        validation_due=validation_due,
        checkpoints=checkpoints or NoCheckpoints(),
        stop=stop or StopRequest(),
    )
    return asyncio.run(async_grpo_train(run))


def test_weights_are_published_before_anything_is_collected_and_after_each_step():
    recorder = Recorder()
    assert train(recorder, num_steps=1) == 1
    assert recorder.calls == [
        "publish 0",
        "collecting",
        "sample 0",
        "window opens",
        "score",
        "train",
        "window closes",
        "settle 0 evicted [7]",
        "publish 1",
        "report 0",
        "collector stopped",
    ]


def test_a_run_that_starts_at_its_last_step_trains_nothing():
    recorder = Recorder()
    assert train(recorder, start_step=2, num_steps=2) == 2
    assert "train" not in recorder.calls


def test_validation_runs_inside_a_pause():
    recorder = Recorder()
    train(recorder, num_steps=1, validation_due=lambda finished: finished == 0)
    start = recorder.calls.index("pause")
    assert recorder.calls[start : start + 4] == ["pause", "evaluate", "validated 0", "resume"]


def test_the_end_of_the_data_ends_the_run_a_step_earlier_without_an_error():
    recorder = Recorder(data_ends_at=1)
    assert train(recorder, num_steps=5) == 1
    assert recorder.calls[-1] == "collector stopped"


def test_a_closed_buffer_ends_the_run_with_its_cause():
    recorder = Recorder(fails_at=1)
    with pytest.raises(ReplayClosed, match="worker 3: out of memory"):
        train(recorder, num_steps=5)
    assert recorder.calls[-1] == "collector stopped"


def test_a_batch_is_laid_out_by_prompt_whichever_finished_first():
    class OutOfOrder(Recorder):
        async def sample(self, target_step):
            groups = tuple(make_group(ordinal, target_step, target_step) for ordinal in (5, 3, 4))
            return Sampled(groups=groups, evicted=(), waited_s=0.0, buffer_size=0)

        def rollouts(self, groups):
            self.calls.append(f"batch {[group.ordinal for group in groups]}")

        def step(self, step, *, sampled, scored, trained, collected, clock):
            self.calls.append(f"report {[group.ordinal for group in sampled.groups]}")

    recorder = OutOfOrder()
    train(recorder, num_steps=1)
    assert "batch [3, 4, 5]" in recorder.calls and "report [3, 4, 5]" in recorder.calls
