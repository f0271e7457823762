"""Who is paused, drained and woken, in which order, and what happens when a transfer fails."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from megatron_grpo.errors import WeightSyncFailed
from megatron_grpo.weight_sync.colocated import ColocatedDrainSync
from megatron_grpo.weight_sync.drain import DrainSync


class Parts:
    """Collector, engine and transfer in one recorder; `pauses` counts open pauses."""

    def __init__(self, *, broken=None):
        self.calls = []
        self.pauses = 0
        self.broken = broken

    def record(self, call):
        self.calls.append(call)
        if call == self.broken:
            raise WeightSyncFailed(f"{call} broke")

    @asynccontextmanager
    async def paused(self):
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    async def drain(self):
        assert self.pauses == 1
        self.record("drain")

    async def transfer(self):
        assert self.pauses == 1
        self.record("transfer")

    async def set_version(self, version):
        assert self.pauses == 1
        self.record(f"version {version}")

    async def sleep(self):
        self.record("sleep")

    async def wake(self):
        assert self.pauses == 1
        self.record("wake")


def test_drain_mode_moves_weights_between_drain_and_version():
    parts = Parts()
    asyncio.run(DrainSync(collector=parts, engine=parts, transfer=parts).publish(4))
    assert parts.calls == ["drain", "transfer", "version 4", "version 4"]  # engine, then collector
    assert parts.pauses == 0


def test_a_failed_transfer_leaves_the_version_and_ends_the_pause():
    parts = Parts(broken="transfer")
    with pytest.raises(WeightSyncFailed):
        asyncio.run(DrainSync(collector=parts, engine=parts, transfer=parts).publish(4))
    assert parts.calls == ["drain", "transfer"]
    assert parts.pauses == 0


def test_colocated_drains_before_training_and_stays_paused_until_the_wake():
    parts = Parts()
    sync = ColocatedDrainSync(collector=parts, engine=parts)

    async def step():
        async with sync.training_window():
            parts.record("train")
        assert parts.pauses == 1
        await sync.publish(1)

    asyncio.run(step())
    assert parts.calls == ["drain", "sleep", "train", "wake", "version 1", "version 1"]
    assert parts.pauses == 0


@pytest.mark.parametrize("broken", ["drain", "sleep", "train", "wake", "version 1"])
def test_colocated_ends_its_pause_whatever_fails(broken):
    parts = Parts(broken=broken)
    sync = ColocatedDrainSync(collector=parts, engine=parts)

    async def step():
        async with sync.training_window():
            parts.record("train")
        await sync.publish(1)

    with pytest.raises(WeightSyncFailed, match=broken):
        asyncio.run(step())
    assert parts.pauses == 0
