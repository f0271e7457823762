"""Seconds and bytes of a weight update, shared, resharded in place and between worlds, against a plain copy.

    python benchmarks/refit.py [parameters ...]        default 100000 2000000 20000000

Four processes forked from one, one thread each, over gloo; every number is the median of REFITS rounds on the slowest
rank, in milliseconds.

    copy         memory copy of what one TP1 engine rank holds, timed in the same rounds
    checksum     fingerprint of the same bytes: the proof alone (wanted: about a memory pass)
    shared       colocated, same layout: engine and trainer share the tensors, nothing moves
    second model colocated, train TP2 -> engine TP1 x 2 in the same two processes, proof included
    disjoint     train TP2 -> generate TP1 x 2 in a world of its own, proof included

`sent` is what crosses a process boundary over what all engine ranks hold; `late` is the median of the last 10 rounds
over that of the first 10 (wanted: at most 1.1).
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_grpo.config.schema import Recipe
from megatron_grpo.layout import Gpu, Sizes, World, build_world
from megatron_grpo.platform.device import CPU
from megatron_grpo.weight_sync.seat import Seat

REFITS, VOCAB, LAYERS = 20, 256, 4
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One rank's milliseconds of each round, by what was timed; bytes it sent in one round; bytes it holds."""

    rounds: dict[str, list[float]]
    sent: int
    held: int


def free_address() -> Address:
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return Address(host="127.0.0.1", port=port)


def recipe(num_parameters: int) -> Recipe:
    """A decoder of about that many parameters: 4 layers of 10 x width^2, and two vocabularies of 256."""
    width = max(32, round((num_parameters / (10 * LAYERS)) ** 0.5 / 32) * 32)
    return Recipe.model_validate(
        {
            "policy": {
                "precision": "float32",
                "model_config": {
                    "hidden_size": width,
                    "intermediate_size": 2 * width,
                    "num_hidden_layers": LAYERS,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "head_dim": width // 4,
                },
                "megatron_cfg": {"tensor_model_parallel_size": 2},
                "generation": {"mcore_generation_config": {"tensor_model_parallel_size": 1}},
            }
        }
    )


def cut(tp: int) -> World:
    return build_world([Gpu(node=0, gpu=gpu) for gpu in range(2)], Sizes(tp=tp))


def counting_service(counter: list[int]):
    """The product's copy service; `counter[0]` grows by the bytes that leave the process."""
    from megatron_grpo.weight_sync.gloo import HostCopy

    class Counting(HostCopy):
        def run(self) -> None:
            counter[0] += sum(one.tensor.nbytes for one in self._sends if one.peer != self.rank)
            super().run()

    return Counting


def timed(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - begin)


def held_bytes(module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def second_model(rank: int, size: int, rendezvous: Address, _: Address) -> Measured | None:
    """Ranks 0 and 1 train and generate; the two others have nothing to do."""
    from megatron_grpo.engines.megatron import build
    from megatron_grpo.weight_sync.places import ModuleSums
    from megatron_grpo.weight_sync.second_model import SecondModel

    if rank > 1:
        return None
    policy = build.policy(recipe(size), cut(2), rank, rendezvous, VOCAB, CPU)
    copy = build.second_module(recipe(size), cut(1), VOCAB, CPU)
    counter = [0]
    second = SecondModel(
        policy.module, copy, backend="gloo", timeout_s=TIMEOUT_S, copy_service=counting_service(counter)
    )
    second.refresh()
    counter[0] = 0
    sums = ModuleSums(copy, rank)
    flat = torch.cat([parameter.detach().flatten() for parameter in copy.parameters()])
    other = torch.empty_like(flat)
    rounds = {name: [] for name in ("copy", "checksum", "shared", "second model")}
    for _ in range(REFITS):
        torch.distributed.barrier()
        rounds["copy"].append(timed(lambda: other.copy_(flat)))
        rounds["checksum"].append(timed(sums.now))
        rounds["shared"].append(timed(policy.enter_generation))
        policy.enter_training()
        torch.distributed.barrier()
        rounds["second model"].append(timed(second.refresh))
    return Measured(rounds=rounds, sent=counter[0] // REFITS, held=held_bytes(copy))


def disjoint(rank: int, size: int, rendezvous: Address, meeting: Address, generators: Address | None = None):
    """Ranks 0 and 1 train, 2 and 3 generate."""
    from megatron_grpo.engines.megatron import build
    from megatron_grpo.weight_sync.transfer import WeightTransfer

    trains = rank < 2
    if trains:
        module = build.policy(recipe(size), cut(2), rank, rendezvous, VOCAB, CPU).module
    else:
        module = build.generation_module(recipe(size), cut(1), rank - 2, generators, VOCAB, CPU)
    counter = [0]
    seat = Seat(host=meeting.host, port=meeting.port, rank=rank, num_policy=2, num_generation=2)
    transfer = WeightTransfer(
        module, seat, backend="gloo", timeout_s=TIMEOUT_S, copy_service=counting_service(counter)
    )
    move = transfer.send if trains else transfer.receive
    move()
    counter[0] = 0
    rounds = [timed(move) for _ in range(REFITS)]
    return Measured(rounds={"disjoint": rounds}, sent=counter[0] // REFITS, held=0 if trains else held_bytes(module))


def run(function: Callable, size: int) -> list[Measured]:
    """`function(rank, size, ...)` in four forked processes; their measurements."""
    addresses = [free_address() for _ in range(3 if function is disjoint else 2)]
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def rank_of(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            answers.put(function(rank, size, *addresses))
        except BaseException:  # noqa: BLE001 - the parent prints it and ends
            answers.put(traceback.format_exc())

    processes = [fork.Process(target=rank_of, args=(rank,), daemon=True) for rank in range(4)]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    if errors := [one for one in found if isinstance(one, str)]:
        sys.exit(errors[0])
    return [one for one in found if one is not None]


def slowest(measured: list[Measured], name: str) -> list[float]:
    """Each round's time on its slowest rank."""
    return [max(times) for times in zip(*(one.rounds[name] for one in measured), strict=True)]


def row(measured: list[Measured], name: str, copy_ms: float, *, moves: bool) -> str:
    times = slowest(measured, name)
    median = statistics.median(times)
    late = statistics.median(times[-10:]) / statistics.median(times[:10])
    text = f"  {name:<13}{median:>10.3f} ms{median / copy_ms:>9.2f} x copy   late {late:4.2f}"
    if moves:
        text += f"   sent {sum(one.sent for one in measured) / sum(one.held for one in measured):4.2f}"
    return text


def main() -> None:
    sizes = [int(float(size)) for size in sys.argv[1:]] or [100_000, 2_000_000, 20_000_000]
    torch.set_num_threads(1)
    CPU.prepare()
    from megatron_grpo.engines.megatron import policy  # noqa: F401 - loaded once, inherited by every rank

    for size in sizes:
        colocated, apart = run(second_model, size), run(disjoint, size)
        copy_ms = statistics.median(slowest(colocated, "copy"))
        held = max(one.held for one in colocated)
        print(f"{held / 4e6:.2f} M parameters, {held / 1e6:.1f} MB per engine rank; copy {copy_ms:.3f} ms")
        print(row(colocated, "checksum", copy_ms, moves=False))
        print(row(colocated, "shared", copy_ms, moves=False))
        print(row(colocated, "second model", copy_ms, moves=True))
        print(row(apart, "disjoint", copy_ms, moves=True), flush=True)


if __name__ == "__main__":
    main()
