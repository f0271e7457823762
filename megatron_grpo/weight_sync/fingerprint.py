"""Checksums that tell whether the weights an engine holds are those the trainer sent.

Exact and independent of how a tensor is cut: sum over elements of bits(element) x (2 x global index + 1), modulo 2^64.
Shards of one tensor add up to the checksum of the whole; two swapped elements a != b change it by
(a - b) x 2 x (i - j), which is not 0 modulo 2^64 for any tensor that fits in memory, so permuted rows or experts show.
Integer arithmetic: no rounding, no order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ELEMENTS_AT_ONCE = 1 << 17  # a mebibyte of int64: stays in a core's cache between its three uses
ON_DEVICE_AT_ONCE = 1 << 24  # where launching a kernel costs more than leaving the cache
MODULUS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Shard `index` of `count` along `dim`. With `stride` s the dimension holds s parts that are cut one by one.

    Example: a fused [gate; up] of 8 rows on 2 ranks has stride 2; rank 1 holds rows 2, 3 (gate) and 6, 7 (up).
    """

    index: int = 0
    count: int = 1
    dim: int = 0
    stride: int = 1

    def positions(self, length: int) -> Tensor:
        """Global positions of the `length` local entries along `dim`."""
        part = length // self.stride
        starts = torch.arange(self.stride) * part * self.count + self.index * part
        return (starts[:, None] + torch.arange(part)).flatten()


class Weighing:
    """The checksum of shards of one shape, cut and device; the weights of their elements are worked out once.

    A shard is seen as a matrix with index = first index of the row + offset of the column, so that the sum over its
    elements falls apart into sums of rows and of columns: additions only, on pieces that stay in the cache.
    """

    def __init__(self, shape: tuple[int, ...], cut: Cut, device: torch.device):
        rows, columns = _indices(shape or (1,), cut)
        self._of_rows = (2 * rows + 1).to(device)
        self._of_columns = (2 * columns).to(device)

    def checksum(self, shard: Tensor) -> int:
        """The shard's share of the checksum of the whole tensor, 0 <= value < 2^64."""
        bits = shard.detach().contiguous().view(BIT_TYPES[shard.element_size()])
        rows, columns = _sums(bits.view(len(self._of_rows), len(self._of_columns)))
        return int((rows * self._of_rows).sum() + (columns * self._of_columns).sum()) % MODULUS


def checksum(shard: Tensor, cut: Cut) -> int:
    """`Weighing` for one use."""
    return Weighing(tuple(shard.shape), cut, shard.device).checksum(shard)


def _indices(shape: tuple[int, ...], cut: Cut) -> tuple[Tensor, Tensor]:
    """Global index of each row's first element, and offset of each column, of the shard [shape] as a matrix.

    Rows end with the cut dimension, unless it is the last one: then columns begin with it.
    """
    before, length, after = math.prod(shape[: cut.dim]), shape[cut.dim], math.prod(shape[cut.dim + 1 :])
    outer = torch.arange(before) * (length * cut.count * after)
    positions = cut.positions(length) * after
    if cut.dim == len(shape) - 1:
        return outer, positions
    return (outer[:, None] + positions).flatten(), torch.arange(after)


def _sums(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows and of the columns of an integer matrix, modulo 2^64."""
    num_rows, width = bits.shape
    at_once = ON_DEVICE_AT_ONCE if bits.is_cuda else ELEMENTS_AT_ONCE
    height = max(1, min(num_rows, at_once // max(1, width)))
    wide = torch.empty(height, width, dtype=torch.int64, device=bits.device)
    of_rows = torch.empty(num_rows, dtype=torch.int64, device=bits.device)
    of_columns = torch.zeros(width, dtype=torch.int64, device=bits.device)
    for part, sums in zip(bits.split(height), of_rows.split(height), strict=True):
        piece = wide[: len(part)].copy_(part)
        torch.sum(piece, 1, out=sums)
        of_columns += piece.sum(0)
    return of_rows, of_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSum:
    """A rank's share of one tensor's checksum."""

    index: int
    count: int
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSums:
    """What one rank sent or holds, by the tensor's name in the whole model."""

    rank: int
    sums: Mapping[str, ShardSum]


def differences(sent: Sequence[RankSums], held: Sequence[RankSums]) -> list[str]:
    """Why the two sides do not hold the same weights; empty when they do. Every replica on either side is compared."""
    problems: list[str] = []
    ours, theirs = _totals(sent, "sender", problems), _totals(held, "engine", problems)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            problems.append(f"{name}: only the {'sender' if name in ours else 'engine'} has it")
        elif ours[name] != theirs[name]:
            problems.append(f"{name}: checksum sent {ours[name]:#018x}, held {theirs[name]:#018x}")
    return problems


def _totals(side: Sequence[RankSums], who: str, problems: list[str]) -> dict[str, int]:
    """Checksum of each whole tensor; replicas of a shard must agree and no shard may be missing."""
    shards: dict[str, dict[int, ShardSum]] = defaultdict(dict)
    for rank in side:
        for name, mine in rank.sums.items():
            other = shards[name].setdefault(mine.index, mine)
            if other != mine:
                problems.append(f"{name}: {who} rank {rank.rank} differs from another replica of shard {mine.index}")
    for name, parts in shards.items():
        count = next(iter(parts.values())).count
        if len(parts) != count:
            problems.append(f"{name}: the {who} shows {len(parts)} of {count} shards")
    return {name: sum(part.value for part in parts.values()) % MODULUS for name, parts in shards.items()}
