"""The trainer's end of a weight stream: whole tensors of rank 0 to every worker of an engine that reads Hugging Face
names. Buckets bound the memory; the checksums of what was sent are compared with those of what arrived.

Rank 0 of the trainer is rank 0 of the group that it forms with the workers; the other trainer ranks only help it to
gather. `send` is collective over the trainer's world, and meets `receive_weights` of the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import WeightSyncFailed
from .fingerprint import Cut, checksum
from .wire import BUCKET_BYTES, Manifest, TensorMeta, buckets, buffer_for, views

Sums = dict[str, int]


class Export(Protocol):
    """Where the tensors come from. Walking is collective over the trainer's ranks; only rank 0 gets something."""

    @property
    def manifest(self) -> Manifest: ...

    def walk(self) -> Iterator[tuple[str, Tensor]]: ...


class Channel(Protocol):
    def broadcast(self, buffer: Tensor) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSeat:
    """Where rank 0 of the trainer meets `num_workers` workers. `host` is an address of rank 0's machine."""

    host: str
    port: int
    num_workers: int
    timeout_s: float


class WeightStream:
    """One trainer rank's end. `open_channel` is called on rank 0 alone; after a failure `join` makes a new start.

    With no worker to send to (all of them died) a stream still walks and sums.
    """

    def __init__(
        self,
        export: Export,
        *,
        rank: int,
        device: torch.device,
        open_channel: Callable[[StreamSeat], Channel],
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._export = export
        self._rank = rank
        self._device = device
        self._open_channel = open_channel
        self._bucket_bytes = bucket_bytes
        self._channel: Channel | None = None

    @property
    def manifest(self) -> Manifest:
        return self._export.manifest

    def join(self, seat: StreamSeat) -> None:
        """Meet the workers (again). Raises WeightSyncFailed when one is missing after `seat.timeout_s`."""
        self.close()
        self._seat = seat
        if self._rank == 0 and seat.num_workers:
            self._channel = self._guarded("meet the engine's workers", self._open_channel, seat)

    def send(self) -> Sums | None:
        """One stream. Rank 0: the checksum of every tensor sent, by name. Raises WeightSyncFailed."""
        if self._rank != 0:
            for _ in self._export.walk():
                raise AssertionError("only rank 0 gets tensors")
            return None
        return self._guarded("send the weights", self._send)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send(self) -> Sums:
        if self._seat.num_workers and self._channel is None:
            raise RuntimeError("the stream was broken by an earlier failure and not joined again")
        sums: Sums = {}
        tensors = self._export.walk()
        for bucket in buckets(self.manifest, self._bucket_bytes):
            buffer = buffer_for(bucket, self._device)
            for meta, (name, place) in zip(bucket, views(buffer, bucket), strict=True):
                place.copy_(_next(tensors, meta))
                sums[name] = checksum(place, Cut())
            if self._channel is not None:
                self._channel.broadcast(buffer)
        return sums

    def _guarded(self, what: str, action: Callable[..., Any], *args: Any) -> Any:
        begin = time.monotonic()
        try:
            return action(*args)
        except Exception as error:
            self.close()
            raise WeightSyncFailed(
                f"trainer rank 0 could not {what}: failed after {time.monotonic() - begin:.1f} s, deadline "
                f"timeouts.refit = {self._seat.timeout_s:g} s: {error}"
            ) from error


def _next(tensors: Iterator[tuple[str, Tensor]], meta: TensorMeta) -> Tensor:
    name, tensor = next(tensors)
    assert TensorMeta.of(name, tensor) == meta, f"{TensorMeta.of(name, tensor)} came for {meta}"
    return tensor


def sum_differences(sent: Sums, arrived: Sums, who: str) -> list[str]:
    """Why a worker does not hold what was sent, a line per tensor; empty when it does."""
    problems = [f"{name}: {who} did not get it" for name in sent.keys() - arrived.keys()]
    problems += [f"{name}: {who} got it, but it was not sent" for name in arrived.keys() - sent.keys()]
    return sorted(problems) + [
        f"{name}: checksum sent {sent[name]:#018x}, {who} got {arrived[name]:#018x}"
        for name in sorted(sent.keys() & arrived.keys())
        if sent[name] != arrived[name]
    ]
