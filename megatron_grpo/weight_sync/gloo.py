"""Megatron's copy service over gloo: messages between ranks through host memory.

Receives are staged and copied into place only after the last byte has arrived, so a failed transfer leaves the
destination as it was. Megatron's own gloo service pins its buffers, which needs a CUDA driver, and keeps the operations
of a failed transfer for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.base import CopyService
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """One slice of a tensor on its way to or from `peer`; both ends know it by the same `task`."""

    tensor: Tensor
    peer: int
    task: int


class HostCopy(CopyService):
    """Use once per transfer: submit everything, then `run`. What a rank sends to itself stays on its device."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group=group)
        self._sends: list[Message] = []
        self._receives: list[Message] = []

    def submit_send(self, src_tensor: Tensor, dest_rank: int, task_id: int | None = None) -> None:
        assert task_id is not None
        self._sends.append(Message(tensor=src_tensor.detach(), peer=dest_rank, task=task_id))

    def submit_recv(self, dest_tensor: Tensor, src_rank: int, task_id: int | None = None) -> None:
        assert task_id is not None
        self._receives.append(Message(tensor=dest_tensor, peer=src_rank, task=task_id))

    def run(self) -> None:
        """Exchange all messages; raises RuntimeError when the group's time-out passes or a peer is gone."""
        # gloo matches the messages of a pair of ranks by their order: the order of tasks, on both ends.
        sends = self._to_others(self._sends)
        receives = self._to_others(self._receives)
        arrived = [torch.empty(message.tensor.shape, dtype=message.tensor.dtype) for message in receives]
        outgoing = [message.tensor.to("cpu").contiguous() for message in sends]
        works = [self.group.recv([buffer], message.peer, 0) for buffer, message in zip(arrived, receives, strict=True)]
        works += [self.group.send([buffer], message.peer, 0) for buffer, message in zip(outgoing, sends, strict=True)]
        for work in works:
            work.wait()
        for buffer, message in zip(arrived, receives, strict=True):
            message.tensor.copy_(buffer)
        self._copy_own()

    def _to_others(self, messages: list[Message]) -> list[Message]:
        return sorted((one for one in messages if one.peer != self.rank), key=lambda message: message.task)

    def _copy_own(self) -> None:
        sent = {message.task: message.tensor for message in self._sends if message.peer == self.rank}
        for message in self._receives:
            if message.peer == self.rank:
                message.tensor.copy_(sent[message.task])
