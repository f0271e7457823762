"""Runs a function on the ranks of a small gloo world: processes forked from this one, which has Megatron loaded.

`run_world(function, size=2, tp=2)` returns what `function(seat, ...)` returned on each rank. A rank that raises ends
the world and the test, with its own traceback. No process outlives the call.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from megatron_grpo.layout import Gpu, Sizes, World, build_world
from megatron_grpo.platform.device import CPU, Accelerator

GRACE_S = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A rank's place: everything an engine needs to join."""

    world: World
    rank: int
    rendezvous: Address
    accelerator: Accelerator = CPU

    def join(self, timeout_s: float = 60.0) -> None:
        from megatron_grpo.engines.megatron.parallel import init_world

        init_world(self.world, self.rank, self.rendezvous.host, self.rendezvous.port, self.accelerator, timeout_s)


class WorldFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


def preload() -> None:
    """Import in this process what every rank needs, so that ranks start in milliseconds."""
    torch.set_num_threads(1)
    CPU.prepare()
    from megatron_grpo.engines.megatron import policy  # noqa: F401


def small_world(size: int = 1, tp: int = 1, sequence_parallel: bool = False) -> World:
    return build_world([Gpu(node=0, gpu=i) for i in range(size)], Sizes(tp=tp, sequence_parallel=sequence_parallel))


def free_address() -> Address:
    """A port below the range from which the system serves gloo's own sockets: nothing takes it before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return Address(host="127.0.0.1", port=port)


def run_world(
    function: Callable[..., Any],
    *args: Any,
    size: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    world: World | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """`function(seat, *args)` on every rank; results in rank order (they travel pickled). Raises WorldFailed.

    `world` instead of the sizes gives any other cut.
    """
    preload()
    world, address = world or small_world(size, tp, sequence_parallel), free_address()
    seats = [Seat(world=world, rank=rank, rendezvous=address) for rank in range(world.size)]
    fork = multiprocessing.get_context("fork")
    ends, processes = [], []
    try:
        for seat in seats:
            mine, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_rank, args=(function, seat, args, theirs))
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        return _collect(ends, timeout_s)
    finally:
        for process in processes:
            _end(process)


def _rank(function: Callable[..., Any], seat: Seat, args: tuple, results: Connection) -> None:
    os.setsid()
    torch.set_num_threads(1)
    try:
        results.send((True, function(seat, *args)))
    except BaseException:  # noqa: BLE001 - handed on: the parent raises it
        results.send((False, traceback.format_exc()))
    results.close()
    os._exit(0)  # skip the forked copy of pytest


def _collect(ends: list[Connection], timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in answers]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(ends)) if rank not in answers]
            raise WorldFailed(f"ranks {missing} did not answer within {timeout_s:g} s")
        for end in ready:
            rank = ends.index(end)
            try:
                succeeded, answer = end.recv()
            except EOFError:
                raise WorldFailed(f"rank {rank} died without an answer") from None
            if not succeeded:
                raise WorldFailed(f"rank {rank} of {len(ends)}:\n{answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(ends))]


def _end(process: multiprocessing.Process) -> None:
    """A rank that answered exits by itself; whatever is left of its session is killed."""
    process.join(GRACE_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()
    process.close()
