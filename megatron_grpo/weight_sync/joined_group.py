"""One process group over the ranks of two independent torch.distributed worlds."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


def join(
    *, host: str, port: int, rank: int, size: int, backend: Literal["gloo", "nccl"], timeout_s: float
) -> dist.ProcessGroup:
    """Meet `size` ranks at host:port (rank 0 listens there) and return their group. Collective over all of them.

    `timeout_s` bounds the meeting and each later operation; torch raises DistStoreError or RuntimeError. The group is
    unusable after any failure: leave it and join another at a new port.
    """
    timeout = timedelta(seconds=timeout_s)
    name = f"transfer-{host}-{port}"
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    # torch has no public call for a group that is not part of the default world.
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Forget the group; purely local."""
    dist.destroy_process_group(group)


def broadcast(group: dist.ProcessGroup, buffer: Tensor) -> None:
    """From the group's rank 0 to all others, in place. RuntimeError when a peer is late or gone."""
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()
