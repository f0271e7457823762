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
from megatron.core.transformer.module import MegatronModule

from ..errors import WeightSyncFailed
from . import joined_group
from .reshard import COPY_SERVICES, CopyServiceFactory, Resharding
from .seat import Seat


class WeightTransfer:
    """One rank's end of the transfer. `module` is the unwrapped model: source on trainers, destination on generators.

    Construction joins the group: collective, raises WeightSyncFailed when a peer is missing after `timeout_s`. After a
    failed transfer the group is gone; over gloo the destination still holds its old weights unless the checksums
    differed. `rejoin` at a new port makes another attempt possible. `copy_service` carries the bytes; None is the
    backend's own.
    """

    def __init__(
        self,
        module: MegatronModule,
        seat: Seat,
        *,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
        copy_service: CopyServiceFactory | None = None,
    ):
        self._module = module
        self._backend: Literal["gloo", "nccl"] = backend
        self._timeout_s = timeout_s
        self._copy_service = copy_service or COPY_SERVICES[backend]
        self._group: dist.ProcessGroup | None = None
        self._resharding: Resharding | None = None
        self.rejoin(seat)

    def rejoin(self, seat: Seat) -> None:
        """Join (again). Collective over both sides; every rank names the same, unused port."""
        self.close()
        self._seat = seat
        self._guarded("join the transfer group", self._join)

    def send(self) -> None:
        """On every trainer rank, together with `receive`. Raises WeightSyncFailed."""
        assert self._seat.sends, f"rank {self._seat.rank} of the joined group receives"
        self._guarded("send weights", self._move)

    def receive(self) -> None:
        """On every generation rank, while the engine is paused. Raises WeightSyncFailed."""
        assert not self._seat.sends, f"rank {self._seat.rank} of the joined group sends"
        self._guarded("receive weights", self._move)

    def close(self) -> None:
        """Leave the group; local and repeatable."""
        self._resharding = None
        if self._group is not None:
            joined_group.leave(self._group)
            self._group = None

    def _join(self) -> None:
        seat = self._seat
        self._group = joined_group.join(
            host=seat.host,
            port=seat.port,
            rank=seat.rank,
            size=seat.size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        self._resharding = Resharding(
            self._group,
            source=self._module if seat.sends else None,
            target=None if seat.sends else self._module,
            target_offset=seat.num_policy,
        )

    def _move(self) -> None:
        if self._group is None or self._resharding is None:
            raise RuntimeError("the transfer group was lost by an earlier failure and not joined again")
        self._resharding.move(self._copy_service(self._group))
        self._resharding.confirm()

    def _guarded(self, what: str, action: Callable[[], None]) -> None:
        """Run a collective action; on any failure drop the group and report the deadline and the cause."""
        begin = time.monotonic()
        try:
            action()
        except Exception as error:
            waited = time.monotonic() - begin
            self.close()
            raise WeightSyncFailed(
                f"rank {self._seat.rank} of {self._seat.size} (trainers first) could not {what}: failed after "
                f"{waited:.1f} s, deadline timeouts.refit = {self._timeout_s:g} s: {error}"
            ) from error
