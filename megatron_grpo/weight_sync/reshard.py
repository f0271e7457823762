"""Moves all weights of one model into another that is cut differently, and proves that they arrived.

The schedule is made once, from what every rank says of its tensors, and used for each later move.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from megatron.core.resharding import build_plan_from_rosters, execute_reshard_plan, index_metadata_rosters
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.refit import _harmonize_buffer_dtypes
from megatron.core.resharding.utils import ReshardPlan
from megatron.core.transformer.module import MegatronModule

from .fingerprint import RankSums, differences
from .gloo import HostCopy
from .places import ModuleSums, tensor_places

MAX_REPORTED = 5

CopyServiceFactory = Callable[[dist.ProcessGroup], CopyService]
"""Made anew for every move: one that failed still holds the operations of that move."""

COPY_SERVICES: dict[str, CopyServiceFactory] = {"gloo": HostCopy, "nccl": NCCLCopyService}


class Resharding:
    """A rank's part in moving `source` models into `target` models over `group`; unwrapped, either may be None.

    `move` and `confirm` are collective over the group. An offset is the number in the group of rank 0 of the world that
    the model's own process groups belong to.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        source: MegatronModule | None,
        target: MegatronModule | None,
        source_offset: int = 0,
        target_offset: int = 0,
    ):
        self._group = group
        self._source = source
        self._target = target
        self._source_offset = source_offset
        self._target_offset = target_offset
        self._sent = None if source is None else ModuleSums(source, group.rank(), source_offset)
        self._held = None if target is None else ModuleSums(target, group.rank(), target_offset)
        self._plan: ReshardPlan | None = None

    def move(self, service: CopyService) -> None:
        """Fill the targets. Raises RuntimeError when a peer is late or gone, or the two models do not match."""
        if self._plan is None:
            self._plan = self._make_plan()
        _harmonize_buffer_dtypes(self._plan, self._source, self._target, group=self._group)
        execute_reshard_plan(self._plan, self._source, self._target, service=service, group=self._group)

    def confirm(self) -> None:
        """Compare checksums of all ranks; also the barrier after which all weights are in place everywhere.

        Raises RuntimeError that names the tensors in which the two sides differ.
        """
        mine = self._now(self._sent), self._now(self._held)
        everyone = [mine] * self._group.size()
        dist.all_gather_object(everyone, mine, group=self._group)
        sent = [sums for sums, _ in everyone if sums is not None]
        held = [sums for _, sums in everyone if sums is not None]
        if problems := differences(sent, held):
            shown = "\n".join(problems[:MAX_REPORTED])
            raise RuntimeError(f"{len(problems)} tensors are not what was sent:\n{shown}")

    def _make_plan(self) -> ReshardPlan:
        rank, everyone = self._group.rank(), [None] * self._group.size()
        mine = (
            self._places(self._source, self._source_offset),
            self._places(self._target, self._target_offset),
        )
        dist.all_gather_object(everyone, mine, group=self._group)
        targets, sources = index_metadata_rosters(everyone)
        return build_plan_from_rosters(targets, sources, rank)

    def _places(self, module: MegatronModule | None, offset: int) -> list:
        return [] if module is None else tensor_places(module, self._group.rank(), offset)

    def _now(self, sums: ModuleSums | None) -> RankSums | None:
        return None if sums is None else RankSums(rank=self._group.rank(), sums=sums.now())
