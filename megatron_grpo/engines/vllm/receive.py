"""The receiving end of weight updates, inside vLLM's worker processes: its own weight-transfer interface, two channels.

Named in the engine's settings as worker extension, so that every worker imports this module, which makes both channels
known to vLLM. A worker receives buckets of whole tensors under their Hugging Face names, sums them, and gives them to
the model's loader, which takes its shard and repacks. What a worker does not load it must not miss: `finish` compares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ...weight_sync import joined_group
from ...weight_sync.fingerprint import Cut, checksum
from ...weight_sync.wire import TensorMeta, buckets, buffer_for, views
from .channels import GLOO, NCCL

MAX_REPORTED = 5


@dataclass
class StreamInfo(WeightTransferUpdateInfo):
    """The manifest of a stream, column by column, and the size of its buckets."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int

    def manifest(self) -> list[TensorMeta]:
        columns = zip(self.names, self.dtypes, self.shapes, strict=True)
        return [TensorMeta(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in columns]


class StreamedWeights(WeightTransferEngine):
    """A whole stream per update. `received` holds the checksum of every tensor that came, by name."""

    update_info_cls = StreamInfo
    supports_draft_weight_update = False

    def broadcast(self, buffer: Tensor) -> None:
        """Fill `buffer` with what the trainer sends."""
        raise NotImplementedError

    def start_weight_update(self) -> None:
        self.received: dict[str, int] = {}
        self._loaded: set[str] = set()
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # vLLM's own version asks for an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, info: StreamInfo) -> None:
        for bucket in buckets(info.manifest(), info.bucket_bytes):
            buffer = buffer_for(bucket, self.device)  # a new one each time: loading may keep views until a layer is whole
            self.broadcast(buffer)
            tensors = list(views(buffer, bucket))
            self.received |= {name: checksum(tensor, Cut()) for name, tensor in tensors}
            self._loaded |= self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        missing = sorted({name for name, _ in self.model.named_parameters()} - self._loaded)
        if missing:
            raise RuntimeError(f"{len(missing)} parameters of the engine got no weights: {missing[:MAX_REPORTED]}")


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the trainer's rank 0 is met; this engine's workers take the ranks from `rank_offset` on."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


class GlooStream(StreamedWeights):
    """Over host memory. An operation ends after `timeout_s`."""

    init_info_cls = GlooInit
    group = None

    def init_transfer_engine(self, init: GlooInit) -> None:
        self.shutdown()
        self.group = joined_group.join(
            host=init.master_address,
            port=init.master_port,
            rank=init.rank_offset + self.parallel_config.rank,
            size=init.world_size,
            backend="gloo",
            timeout_s=init.timeout_s,
        )

    def broadcast(self, buffer: Tensor) -> None:
        joined_group.broadcast(self.group, buffer)

    def shutdown(self) -> None:
        if self.group is not None:
            joined_group.leave(self.group)
            self.group = None


class NcclStream(StreamedWeights, NCCLWeightTransferEngine):
    """vLLM's NCCL transfer with our buckets: its handshake and communicator, our sums."""

    def init_transfer_engine(self, init) -> None:
        self.shutdown()
        super().init_transfer_engine(init)

    def broadcast(self, buffer: Tensor) -> None:
        self.model_update_group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())


def register() -> None:
    """Make the channels known to vLLM in this process; again is harmless."""
    for name, engine in ((GLOO, GlooStream), (NCCL, NcclStream)):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)


class WorkerExtension:
    """Mixed into vLLM's worker; called through its collective RPC."""

    def received_sums(self) -> dict[str, str]:
        """Checksums of the last update's tensors, hexadecimal: the RPC's integers end at 63 bits."""
        return {name: f"{value:#x}" for name, value in self.weight_transfer_engine.received.items()}


register()  # vLLM imports the extension in every worker, before it looks its transfer engine up
