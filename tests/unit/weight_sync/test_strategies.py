"""Who is paused, drained and woken, in which order, and what happens when something breaks."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest

from megatron_grpo.errors import WeightSyncFailed
from megatron_grpo.interfaces import EngineCapabilities
from megatron_grpo.weight_sync import quiet as quiet_module
from megatron_grpo.weight_sync.colocated import ColocatedSync
from megatron_grpo.weight_sync.disjoint import DisjointSync
from megatron_grpo.weight_sync.quiet import choose_quiet


class Parts:
    """Collector, engine and transfer in one recorder; `pauses` counts open pauses of the collector."""

    def __init__(self, *, broken=None, pauses_in_flight=True, must_drain=False):
        self.calls = []
        self.pauses = 0
        self.broken = broken
        self.capabilities = EngineCapabilities(
            pauses_in_flight=pauses_in_flight,
            must_drain=must_drain,
            blocks_training=False,
            wake_carries_weights=False,
            tracks_versions=True,
        )

    def record(self, call):
        assert self.pauses == 1 or call == "train", call
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
        self.record("drain")

    async def transfer(self):
        self.record("transfer")

    async def set_version(self, version):
        self.record(f"version {version}")

    async def pause(self):
        self.record("pause")

    async def resume(self):
        self.record("resume")

    async def sleep(self):
        self.record("sleep")

    async def wake(self):
        self.record("wake")


def disjoint(parts, *, in_flight):
    quiet = choose_quiet(parts, parts, in_flight=in_flight)
    return DisjointSync(collector=parts, engine=parts, transfer=parts, quiet=quiet)


def colocated_step(parts, *, in_flight):
    sync = ColocatedSync(collector=parts, engine=parts, quiet=choose_quiet(parts, parts, in_flight=in_flight))

    async def step():
        async with sync.training_window():
            parts.record("train")
        await sync.publish(1)

    asyncio.run(step())


# The version appears twice: engine, then collector.
MOVE = ["transfer", "version 4", "resume", "version 4"]


def test_drain_mode_moves_weights_between_drain_and_version():
    parts = Parts()
    asyncio.run(disjoint(parts, in_flight=False).publish(4))
    assert parts.calls == ["drain", "pause", *MOVE] and parts.pauses == 0


def test_in_flight_pauses_the_engine_without_a_drain():
    parts = Parts()
    asyncio.run(disjoint(parts, in_flight=True).publish(4))
    assert parts.calls == ["pause", *MOVE] and parts.pauses == 0


@pytest.mark.parametrize("pauses", [True, False])
def test_a_backend_that_must_drain_always_drains(pauses):
    parts = Parts(must_drain=True, pauses_in_flight=pauses)
    asyncio.run(disjoint(parts, in_flight=True).publish(4))
    assert parts.calls[0] == "drain"


def test_a_backend_without_the_pause_hook_is_refitted_as_it_runs_and_warned_about_once(caplog):
    quiet_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parts = Parts(pauses_in_flight=False)
            asyncio.run(disjoint(parts, in_flight=True).publish(4))
            assert parts.calls == ["transfer", "version 4", "version 4"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "Parts" in caplog.text


def test_a_backend_without_the_pause_hook_drains_when_in_flight_is_off():
    parts = Parts(pauses_in_flight=False)
    asyncio.run(disjoint(parts, in_flight=False).publish(4))
    assert parts.calls == ["drain", "transfer", "version 4", "version 4"]


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_failed_transfer_leaves_the_version_and_the_engine_paused(in_flight):
    parts = Parts(broken="transfer")
    with pytest.raises(WeightSyncFailed):
        asyncio.run(disjoint(parts, in_flight=in_flight).publish(4))
    assert parts.calls[-1] == "transfer" and "resume" not in parts.calls
    assert parts.pauses == 0


def test_colocated_drains_before_training_and_stays_paused_until_the_wake():
    parts = Parts()
    colocated_step(parts, in_flight=False)
    assert parts.calls == ["drain", "pause", "sleep", "train", "wake", "version 1", "resume", "version 1"]
    assert parts.pauses == 0


def test_colocated_in_flight_sleeps_with_unfinished_requests():
    parts = Parts()
    colocated_step(parts, in_flight=True)
    assert parts.calls == ["pause", "sleep", "train", "wake", "version 1", "resume", "version 1"]


@pytest.mark.parametrize("broken", ["drain", "pause", "sleep", "train", "wake", "version 1", "resume"])
def test_colocated_ends_its_pause_whatever_fails(broken):
    parts = Parts(broken=broken)
    with pytest.raises(WeightSyncFailed, match=broken):
        colocated_step(parts, in_flight=False)
    assert parts.pauses == 0
