"""What both ends of a weight stream agree on: which tensors come in which order, and how buckets of bytes hold them.

Shared by the trainer's rank 0, which sends whole tensors under their Hugging Face names, and the workers of an engine
that loads such names (vLLM). A bucket is one flat buffer; every tensor in it starts at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20
ALIGNMENT = 16  # a multiple of every element size, so that slices can be viewed as any dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """One tensor of the stream. `dtype` as torch names it: "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorMeta:
        return cls(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.torch_dtype.itemsize * torch.Size(self.shape).numel()


Manifest = Sequence[TensorMeta]


def total_bytes(manifest: Manifest) -> int:
    return sum(meta.num_bytes for meta in manifest)


def buckets(manifest: Manifest, limit: int = BUCKET_BYTES) -> Iterator[tuple[TensorMeta, ...]]:
    """Runs of tensors whose buffers are at most `limit` bytes; a tensor larger than that is alone."""
    bucket: list[TensorMeta] = []
    size = 0
    for meta in manifest:
        if bucket and size + _padded(meta) > limit:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(meta)
        size += _padded(meta)
    if bucket:
        yield tuple(bucket)


def buffer_for(bucket: Sequence[TensorMeta], device: torch.device) -> Tensor:
    """An unset uint8 buffer that holds the bucket."""
    return torch.empty(sum(_padded(meta) for meta in bucket), dtype=torch.uint8, device=device)


def views(buffer: Tensor, bucket: Sequence[TensorMeta]) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors by name; they share the buffer's memory."""
    start = 0
    for meta in bucket:
        flat = buffer[start : start + meta.num_bytes]
        yield meta.name, flat.view(meta.torch_dtype).view(meta.shape)
        start += _padded(meta)


def _padded(meta: TensorMeta) -> int:
    return -(-meta.num_bytes // ALIGNMENT) * ALIGNMENT
