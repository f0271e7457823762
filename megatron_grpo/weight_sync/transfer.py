"""Moves weights from trainer ranks to generation ranks of another world, resharding on the way.

Both sides enter together: `send` on every trainer rank, `receive` on every generation rank, and neither returns before
all have arrived (or one failed). Afterwards the engine side holds exactly what was sent, proven by checksums.

Ranks of the joined group: trainers 0 .. num_policy - 1, then the generators.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch.distributed as dist
from megatron.core.resharding import refit
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.utils import _build_layer_module_prefix_map, extract_param_metadata, named_refit_tensors
from megatron.core.transformer.module import MegatronModule

from ..errors import WeightSyncFailed
from . import joined_group
from .fingerprint import Cut, RankSums, ShardSum, checksum, differences
from .gloo import HostCopy
from .seat import Seat

MAX_REPORTED = 5


class WeightTransfer:
    """One rank's end of the transfer. `module` is the unwrapped model: source on trainers, destination on generators.

    Construction joins the group: collective, raises WeightSyncFailed when a peer is missing after `timeout_s`. After a
    failed transfer the group is gone; over gloo the destination still holds its old weights unless the checksums
    differed. `rejoin` at a new port makes another attempt possible.
    """

    def __init__(self, module: MegatronModule, seat: Seat, *, backend: Literal["gloo", "nccl"], timeout_s: float):
        self._module = module
        self._backend: Literal["gloo", "nccl"] = backend
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self.rejoin(seat)

    def rejoin(self, seat: Seat) -> None:
        """Join (again). Collective over both sides; every rank names the same, unused port."""
        self.close()
        self._seat = seat
        self._group = self._guarded("join the transfer group", self._join)

    def send(self) -> None:
        """On every trainer rank, together with `receive`. Raises WeightSyncFailed."""
        assert self._seat.sends, f"rank {self._seat.rank} of the joined group receives"
        self._guarded("send weights", self._swap)

    def receive(self) -> None:
        """On every generation rank, while the engine is paused. Raises WeightSyncFailed."""
        assert not self._seat.sends, f"rank {self._seat.rank} of the joined group sends"
        self._guarded("receive weights", self._swap)

    def close(self) -> None:
        """Leave the group; local and repeatable."""
        # Plans are cached per process without regard to the group or the model.
        refit.clear_all_caches()
        if self._group is not None:
            joined_group.leave(self._group)
            self._group = None

    def _join(self) -> dist.ProcessGroup:
        seat = self._seat
        return joined_group.join(
            host=seat.host,
            port=seat.port,
            rank=seat.rank,
            size=seat.size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )

    def _swap(self) -> None:
        if self._group is None:
            raise RuntimeError("the transfer group was lost by an earlier failure and not joined again")
        refit.swap_model_weights(
            [self._module] if self._seat.sends else None,
            None if self._seat.sends else [self._module],
            refit_method=self._copy_service(self._group),
            group=self._group,
            src_rank_offset=0,
            dst_rank_offset=self._seat.num_policy,
        )
        self._confirm(self._group)

    def _copy_service(self, group: dist.ProcessGroup) -> CopyService:
        """A new one for each transfer: Megatron's cache of services goes by backend name and outlives a group."""
        return HostCopy(group) if self._backend == "gloo" else NCCLCopyService(group)

    def _confirm(self, group: dist.ProcessGroup) -> None:
        """Compare checksums of every rank; also the barrier after which all weights are in place everywhere."""
        mine = RankSums(rank=self._seat.rank, sums=module_sums(self._module, self._own_offset))
        everyone: list[RankSums] = [mine] * self._seat.size
        dist.all_gather_object(everyone, mine, group=group)
        problems = differences(everyone[: self._seat.num_policy], everyone[self._seat.num_policy :])
        if problems:
            shown = "\n".join(problems[:MAX_REPORTED])
            raise RuntimeError(f"{len(problems)} tensors are not what was sent:\n{shown}")

    @property
    def _own_offset(self) -> int:
        return 0 if self._seat.sends else self._seat.num_policy

    def _guarded[T](self, what: str, action: Callable[[], T]) -> T:
        """Run a collective action; on any failure drop the group and report the deadline and the cause."""
        begin = time.monotonic()
        try:
            return action()
        except Exception as error:
            waited = time.monotonic() - begin
            self.close()
            raise WeightSyncFailed(
                f"rank {self._seat.rank} of {self._seat.size} (trainers first) could not {what}: failed after "
                f"{waited:.1f} s, deadline timeouts.refit = {self._timeout_s:g} s: {error}"
            ) from error


def module_sums(module: MegatronModule, rank_offset: int = 0) -> dict[str, ShardSum]:
    """Checksums of this rank's tensors by their names in the whole model (layers and experts numbered globally)."""
    groups, rank = module.pg_collection, dist.get_rank()
    prefixes, sums = _build_layer_module_prefix_map(module), {}
    for name, tensor in named_refit_tensors(module):
        facts = extract_param_metadata(
            tensor,
            name,
            rank + rank_offset,
            groups,
            num_experts=module.config.num_moe_experts,
            layer_module_prefix_map=prefixes,
            rank_offset=rank_offset,
        )
        cut = Cut()
        if facts.is_tp:
            ranks = facts.tensor_parallel_group_ranks
            cut = Cut(
                index=ranks.index(facts.owner_rank),
                count=len(ranks),
                dim=facts.partition_dim,
                stride=facts.partition_stride,
            )
        sums[facts.resolved_name] = ShardSum(index=cut.index, count=cut.count, value=checksum(tensor, cut))
    return sums
