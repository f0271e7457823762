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
ELEMENTS_AT_ONCE = 1 << 24  # bounds the int64 temporaries to a few hundred megabytes
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


def checksum(shard: Tensor, cut: Cut) -> int:
    """This shard's share of the checksum of the whole tensor, 0 <= value < 2^64."""
    local = shard.detach()
    if local.dim() == 0:
        local = local[None]
    shape = [n * cut.count if dim == cut.dim else n for dim, n in enumerate(local.shape)]
    axes = [
        (cut.positions(n) if dim == cut.dim else torch.arange(n)) * math.prod(shape[dim + 1 :])
        for dim, n in enumerate(local.shape)
    ]
    inner = torch.zeros((), dtype=torch.int64)
    for axis in axes[1:]:
        inner = inner[..., None] + axis
    inner, total = inner.to(local.device), 0
    rows = max(1, ELEMENTS_AT_ONCE // max(1, inner.numel()))
    for part, first in zip(local.split(rows), axes[0].to(local.device).split(rows), strict=True):
        index = first.view(-1, *[1] * inner.dim()) + inner
        bits = part.contiguous().view(BIT_TYPES[part.element_size()]).long()
        total += int((bits * (2 * index + 1)).sum())
    return total % MODULUS


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
