"""Every way a weight update can break, in every mode: it ends within its deadline, names its cause, bumps nothing.

The publishing rank runs the real strategy over the real transfer; the fault sits in the service that carries the
bytes, on the receiving rank. Ranks that die or hang are processes of their own below the test's rank.
"""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest

from megatron_grpo.errors import WeightSyncFailed
from megatron_grpo.interfaces import EngineCapabilities
from megatron_grpo.layout import Gpu, Sizes, build_world
from tests.megatron import generation as g
from tests.megatron.test_transfer import Sides
from tests.megatron.world import run_world

TIMEOUT_S = 2.0
FAULTS = {  # what the publishing rank says, and the receiving one if it can still speak
    "raises": ("by peer", "no memory for the weights"),
    "half": ("tensors are not what was sent", "tensors are not what was sent"),
    "wrong": ("1 tensors are not what was sent", "1 tensors are not what was sent"),
    "dies": ("by peer", ""),
    "hangs": ("imed out", ""),
}


def faulty_service(fault):
    """`HostCopy` that breaks on its receiving end."""
    from megatron_grpo.weight_sync.gloo import HostCopy

    class Faulty(HostCopy):
        def run(self):
            if fault == "raises":
                raise MemoryError("no memory for the weights")
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            super().run()
            if fault == "wrong":
                rows = next(message.tensor for message in self._receives if message.tensor.dim() == 2)
                rows[[0, 1]] = rows[[1, 0]].clone()

    return Faulty


class HalfSent:
    """Both ends agree to leave out every second message, as a sender that stops half-way would."""

    def __new__(cls, group):
        from megatron_grpo.weight_sync.gloo import HostCopy

        class Half(HostCopy):
            def run(self):
                self._sends = [message for message in self._sends if message.task % 2]
                self._receives = [message for message in self._receives if message.task % 2]
                super().run()

        return Half(group)


class Recorder:
    """Collector and engine of the strategy: they write down what they were told."""

    def __init__(self, move, *, colocated):
        self.calls = []
        self.move = move
        self.capabilities = EngineCapabilities(
            pauses_in_flight=True,
            must_drain=False,
            blocks_training=colocated,
            wake_carries_weights=colocated,
            tracks_versions=True,
        )

    @asynccontextmanager
    async def paused(self):
        yield

    async def transfer(self):
        await asyncio.to_thread(self.move)

    async def wake(self):
        await asyncio.to_thread(self.move)

    async def sleep(self):
        self.calls.append("sleep")

    async def drain(self):
        self.calls.append("drain")

    async def pause(self):
        self.calls.append("pause")

    async def resume(self):
        self.calls.append("resume")

    async def set_version(self, version):
        self.calls.append(f"version {version}")


async def publish(mode, move):
    """The strategy of `mode` with `move` as its way of moving weights: seconds, error text, calls."""
    from megatron_grpo.weight_sync.colocated import ColocatedSync
    from megatron_grpo.weight_sync.disjoint import DisjointSync
    from megatron_grpo.weight_sync.quiet import choose_quiet

    colocated = mode == "colocated"
    parts = Recorder(move, colocated=colocated)
    quiet = choose_quiet(parts, parts, in_flight=mode != "drain")
    if colocated:
        sync = ColocatedSync(collector=parts, engine=parts, quiet=quiet)
        async with sync.training_window():
            pass
    else:
        sync = DisjointSync(collector=parts, engine=parts, transfer=parts, quiet=quiet)
    begin = time.monotonic()
    with pytest.raises(WeightSyncFailed) as error:
        await sync.publish(7)
    return time.monotonic() - begin, str(error.value), parts.calls


def failure_of_a_process(act):
    """Run `act` in a child until it fails, dies or stops: the text of its WeightSyncFailed, if it could speak."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
        except WeightSyncFailed as failure:
            os.write(writer, str(failure).encode())
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    os.close(writer)
    os.set_blocking(reader, False)  # a stopped child still holds its end
    try:
        return os.read(reader, 1 << 16).decode()
    except BlockingIOError:
        return ""


def disjoint_fault(seat, sides, fault, mode):
    from megatron_grpo.weight_sync.transfer import WeightTransfer

    def part():
        kind = HalfSent if fault == "half" else None if sides.is_policy(seat) else faulty_service(fault)
        module = sides.module(seat)
        return WeightTransfer(
            module, sides.transfer_seat(seat), backend="gloo", timeout_s=TIMEOUT_S, copy_service=kind
        )

    if sides.is_policy(seat):
        return asyncio.run(publish(mode, part().send))
    return failure_of_a_process(lambda: part().receive())


def colocated_fault(seat, fault):
    from megatron_grpo.engines.megatron import build
    from megatron_grpo.weight_sync.second_model import SecondModel

    def second():
        config = g.recipe(tp=2, tensor_model_parallel_size=1)
        trained = g.build_module(seat, config)
        world = build_world([Gpu(node=0, gpu=gpu) for gpu in range(2)], Sizes())
        copy = build.second_module(config, world, g.VOCAB, seat.accelerator)
        kind = HalfSent if fault == "half" else None if seat.rank == 0 else faulty_service(fault)
        return SecondModel(trained, copy, backend="gloo", timeout_s=TIMEOUT_S, copy_service=kind)

    if seat.rank == 0:
        return asyncio.run(publish("colocated", second().refresh))
    return failure_of_a_process(lambda: second().refresh())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["in flight", "drain", "colocated"])
def test_a_broken_update_ends_in_time_by_name_and_bumps_no_version(mode, fault):
    if mode == "colocated":
        answers = run_world(colocated_fault, fault, size=2, tp=2)
    else:
        answers = run_world(disjoint_fault, Sides(policy_tp=1), fault, mode, size=2)
    (seconds, message, calls), from_receiver = answers
    assert seconds < TIMEOUT_S + 3
    ours, theirs = FAULTS[fault]
    assert ours in message and f"timeouts.refit = {TIMEOUT_S:g} s" in message
    assert theirs in from_receiver and bool(theirs) == bool(from_receiver)
    assert "resume" not in calls and not any(call.startswith("version") for call in calls)
    assert calls == {"in flight": ["pause"], "drain": ["drain", "pause"], "colocated": ["pause", "sleep"]}[mode]
