"""How the trainer's rank 0 reaches the workers of an engine: one group per channel, over host memory or NCCL."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import joined_group
from .stream import Channel, StreamSeat


class GlooChannel:
    def __init__(self, seat: StreamSeat):
        self._group = joined_group.join(
            host=seat.host,
            port=seat.port,
            rank=0,
            size=1 + seat.num_workers,
            backend="gloo",
            timeout_s=seat.timeout_s,
        )

    def broadcast(self, buffer: Tensor) -> None:
        joined_group.broadcast(self._group, buffer)

    def close(self) -> None:
        joined_group.leave(self._group)


class NcclChannel:
    """vLLM's own communicator, which its workers meet; not a torch.distributed group."""

    def __init__(self, seat: StreamSeat):
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        address = {"master_address": seat.host, "master_port": seat.port, "world_size": 1 + seat.num_workers}
        self._communicator = trainer_init(address)

    def broadcast(self, buffer: Tensor) -> None:
        stream = torch.cuda.current_stream()
        self._communicator.broadcast(buffer, src=0, stream=stream)
        stream.synchronize()  # the buffer is freed when this returns

    def close(self) -> None:
        self._communicator.destroy()


CHANNELS: dict[str, Callable[[StreamSeat], Channel]] = {"gloo": GlooChannel, "nccl": NcclChannel}
