"""How the tensors of one Megatron parameter are arranged: joined from several, and cut over tensor-parallel ranks.

A layout has four operations; each pair is the exact inverse of the other, and none rounds.

    join   HF tensors -> the whole Megatron parameter (as one rank holds it without tensor parallelism)
    split  the whole parameter -> HF tensors
    shard  the whole parameter -> what tensor-parallel rank `rank` of `size` holds
    gather what all ranks hold, in rank order -> the whole parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    def join(self, parts: Sequence[Tensor]) -> Tensor: ...

    def split(self, whole: Tensor) -> list[Tensor]: ...

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor: ...

    def gather(self, shards: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """One tensor, the same on both sides; `dim` is cut over ranks (None: every rank holds all of it)."""

    dim: int | None = None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (only,) = parts
        return only

    def split(self, whole: Tensor) -> list[Tensor]:
        return [whole]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole if self.dim is None else _run_of_rows(whole, rank, size, self.dim)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)


@dataclass(frozen=True, slots=True)
class GatedHalves:
    """Gate and up projection, one above the other.

    A rank holds [its rows of the gate; its rows of the up projection], which is no single run of rows.
    """

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor) -> list[Tensor]:
        return list(whole.chunk(2))

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([_run_of_rows(half, rank, size) for half in whole.chunk(2)])

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([torch.cat(half) for half in halves])


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Queries, keys and values (weights or biases), interleaved by query group.

    E.g. 4 heads in 2 groups: q0 q1 k0 v0 | q2 q3 k1 v1, each of head_dim rows. Ranks hold runs of rows; with fewer
    groups than ranks a run is a part of a group, which Megatron gathers after the projection.
    """

    num_groups: int
    heads_per_group: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.reshape(self.num_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        head_dim = whole.shape[0] // (self.num_groups * (self.heads_per_group + 2))
        grouped = whole.reshape(self.num_groups, -1, *whole.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split([self.heads_per_group * head_dim, head_dim, head_dim], 1)]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return _run_of_rows(whole, rank, size)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))


def _run_of_rows(whole: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    if whole.shape[dim] % size:
        raise ValueError(f"{whole.shape[dim]} rows (dimension {dim}) cannot be cut for {size} tensor-parallel ranks")
    return whole.chunk(size, dim)[rank]
