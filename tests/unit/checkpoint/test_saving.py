"""When a run saves, what a save consists of, and that it costs the loop only the copies."""

import asyncio
import json
import logging

import pytest

from megatron_grpo.checkpoint.contents import TrainingRecord, read_training_record
from megatron_grpo.checkpoint.directory import CheckpointDirectory
from megatron_grpo.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron_grpo.checkpoint.retention import Retention
from megatron_grpo.checkpoint.saving import RunCheckpoints
from megatron_grpo.data.stream import EpochOrder
from megatron_grpo.data.stream_state import StreamState, stream_state_from_json
from megatron_grpo.errors import CheckpointError
from megatron_grpo.types import FrontierState, ValidationResult

STATE = StreamState(
    order=EpochOrder(num_rows=8, num_served=8, seed=1, shuffle=True),
    cursor=4,
    frontier=FrontierState(cut=3, frontier=4, trained_above_cut=(), dropped_above_cut=()),
    unaligned_because=None,
    rows_digest="d",
)
RECORD = TrainingRecord(
    step=2, num_steps=9, num_prompts_per_step=2, num_generations_per_prompt=4, versions={"torch": "2"}
)


class Stores:
    """Policy, prompts and buffer of a run; `written` says whether the ranks' writers are done."""

    def __init__(self, state=STATE):
        self.written = asyncio.Event()
        self.buffer_written = asyncio.Event()
        self.buffer_written.set()
        self.state = state
        self.calls = []
        self.fails_with = None

    async def begin_save(self, path, *, with_ordinals=None):
        self.calls.append(path.name)
        if self.fails_with is not None:
            raise self.fails_with
        (path / "rank_0" if with_ordinals is None else path).write_text(f"{with_ordinals}")

    async def finish_save(self, *, blocking=None):
        if blocking is None:
            await self.buffer_written.wait()
        elif blocking:
            await self.written.wait()
        return self.written.is_set()

    async def state_for(self, step):
        self.calls.append(f"prompts {step}")
        return self.state


def checkpoints(directory, stores, *, last_saved=0, metric_name="val:accuracy", keep_top_k=None):
    return RunCheckpoints(
        directory,
        Retention(keep_top_k=keep_top_k, metric_name=metric_name, higher_is_better=True, save_period=2),
        policy=stores,
        prompts=stores,
        buffer=stores,
        documents=lambda step: {"recipe.yaml": f"step: {step}", "training.json": RECORD.to_json()},
        num_steps=9,
        last_saved=last_saved,
    )


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    directory.prepare()
    return directory


def validation(accuracy):
    return ValidationResult(
        version=2, accuracy=accuracy, mean_reward=0.1, num_samples=1, mean_length=1.0, seconds=0.0
    )


def test_a_save_is_due_at_each_period_and_at_the_last_step_and_never_twice(directory):
    async def due():
        return [step for step in range(10) if checkpoints(directory, Stores(), last_saved=4).due(step)]

    assert asyncio.run(due()) == [6, 8, 9]


def test_the_loop_goes_on_while_ranks_write_and_a_checkpoint_follows(directory):
    async def run():
        stores = Stores()
        saving = checkpoints(directory, stores)
        await saving.save(2)
        await saving.poll()
        assert directory.latest() is None and not saving.lacks(2)
        saving.validated(2, validation(0.75))
        saving.validated(1, validation(0.25))
        stores.written.set()
        await saving.finish()
        return stores.calls

    assert asyncio.run(run()) == ["policy", "prompts 2", "replay_buffer.pt"]
    path = directory.path(2)
    assert directory.verify(path).step == 2 and read_manifest(path).metrics["val:accuracy"] == 0.75
    assert stream_state_from_json((path / "prompt_stream.json").read_text(), "") == STATE
    assert (path / "recipe.yaml").read_text() == "step: 2" and read_training_record(path) == RECORD
    assert (path / "replay_buffer.pt").read_text() == "True"


def test_poll_does_not_wait_for_the_buffers_file(directory):
    async def run():
        stores = Stores()
        stores.written.set()
        stores.buffer_written.clear()
        saving = checkpoints(directory, stores)
        await saving.save(2)
        await asyncio.wait_for(saving.poll(), 5)
        assert directory.latest() is None
        stores.buffer_written.set()
        await saving.finish()
        assert directory.latest() == 2

    asyncio.run(run())


def test_a_second_save_waits_for_the_first_and_old_ones_are_removed(directory):
    async def run():
        stores = Stores()
        stores.written.set()
        saving = checkpoints(directory, stores, keep_top_k=1)
        for step, accuracy in ((2, 0.9), (4, 0.1), (6, 0.2)):
            await saving.save(step)
            saving.validated(step, validation(accuracy))
        await saving.finish()

    asyncio.run(run())
    assert directory.steps() == (2, 6)


def test_a_metric_that_cannot_rank_checkpoints_is_told(directory, caplog):
    checkpoints(directory, Stores(), metric_name="train:reward", keep_top_k=2)
    assert "'train:reward' is not measured" in caplog.text
    caplog.clear()
    for name in ("val:reward", None):
        checkpoints(directory, Stores(), metric_name=name, keep_top_k=2)
    assert caplog.text == ""


def test_a_run_without_alignment_saves_its_buffer_without_ordinals(directory):
    state = StreamState(order=STATE.order, cursor=4, frontier=None, unaligned_because="legacy", rows_digest="d")

    async def run():
        stores = Stores(state)
        stores.written.set()
        saving = checkpoints(directory, stores)
        await saving.save(2)
        await saving.finish()

    asyncio.run(run())
    assert (directory.path(2) / "replay_buffer.pt").read_text() == "False"


def test_a_disk_that_refuses_is_told_with_a_remedy_and_earlier_checkpoints_stay(directory):
    async def run():
        stores = Stores()
        stores.written.set()
        saving = checkpoints(directory, stores)
        await saving.save(2)
        await saving.finish()
        stores.fails_with = OSError(28, "No space left on device")
        with pytest.raises(CheckpointError, match=r"step_4 was not written.*make room"):
            await saving.save(4)

    asyncio.run(run())
    assert directory.latest() == 2


def test_a_failure_of_the_background_reaches_the_loop(directory):
    async def run():
        stores = Stores()
        stores.written.set()
        saving = checkpoints(directory, stores)
        await saving.save(2)
        (directory.root / "step_2").mkdir()
        (directory.root / "step_2" / "foreign").touch()
        with pytest.raises(CheckpointError, match="step_2 was not written"):
            await saving.finish()

    asyncio.run(run())


def test_a_damaged_training_record_is_refused_by_name(tmp_path):
    path = tmp_path / "training.json"
    for text in ("", "{}", "[1]", json.dumps({"format_version": 1, "step": 3})):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="training.json cannot be read"):
            read_training_record(tmp_path)
    path.write_text(RECORD.to_json().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="format version 2"):
        read_training_record(tmp_path)


def test_the_stall_and_the_total_are_logged(directory, caplog):
    async def run():
        stores = Stores()
        stores.written.set()
        saving = checkpoints(directory, stores)
        await saving.save(2)
        await saving.finish()

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert "training stalled for" in caplog.text and "checkpoint of step 2 took" in caplog.text
    assert (directory.path(2) / MANIFEST_NAME).is_file()
