"""Keeps an engine's own model equal to the trainer's, in the same processes but cut in another way (colocated)."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from ..errors import WeightSyncFailed
from .reshard import COPY_SERVICES, CopyServiceFactory, Resharding


class SecondModel:
    """`copy` is the engine's model on this rank, `trained` the trainer's; both unwrapped, on every rank of the world.

    Construction is collective: it makes a process group whose operations end after `timeout_s`. `copy_service` carries
    the bytes; None is the backend's own.
    """

    def __init__(
        self,
        trained: MegatronModule,
        copy: MegatronModule,
        *,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
        copy_service: CopyServiceFactory | None = None,
    ):
        self._timeout_s = timeout_s
        self._copy_service = copy_service or COPY_SERVICES[backend]
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=backend)
        self._resharding = Resharding(self._group, source=trained, target=copy)

    def refresh(self) -> None:
        """Bring the trainer's weights over; collective, while the engine is asleep. Raises WeightSyncFailed."""
        begin = time.monotonic()
        try:
            self._resharding.move(self._copy_service(self._group))
            self._resharding.confirm()
        except Exception as error:
            raise WeightSyncFailed(
                f"rank {self._group.rank()} of {self._group.size()} could not reshard the weights for its engine: "
                f"failed after {time.monotonic() - begin:.1f} s, deadline timeouts.refit = {self._timeout_s:g} s: {error}"
            ) from error
