"""Sums per sequence of token arrays, whether a row holds one sequence or several packed ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Sequences(ABC):
    """How the tokens of [B, T] arrays belong to sequences."""

    __slots__ = ()

    @abstractmethod
    def spread_sum(self, x: Tensor) -> Tensor:
        """Each token's sequence total of x [B, T], broadcastable against [B, T]. Differentiable."""

    @abstractmethod
    def count(self, valid: Tensor) -> Tensor:
        """How many sequences have at least one valid token (mask [B, T]): a scalar."""

    def lengths(self, valid: Tensor) -> Tensor:
        """Valid tokens of each token's sequence, at least 1; broadcastable against [B, T]."""
        return self.spread_sum(valid.to(torch.int64)).clamp(min=1)

    def spread_mean(self, x: Tensor, valid: Tensor) -> Tensor:
        """Each token's sequence mean over its valid tokens; x [B, T] is 0 where invalid."""
        return self.spread_sum(x) / self.lengths(valid)


@dataclass(frozen=True, slots=True)
class RowSequences(Sequences):
    """One sequence per row."""

    def spread_sum(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def count(self, valid: Tensor) -> Tensor:
        return valid.any(-1).sum()


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences(Sequences):
    """Several sequences per row. `segment_ids` int64 [B, T] lie in [0, T) and restart in every row."""

    segment_ids: Tensor

    def spread_sum(self, x: Tensor) -> Tensor:
        return self._totals(x).gather(-1, self.segment_ids)

    def count(self, valid: Tensor) -> Tensor:
        return (self._totals(valid.to(torch.int64)) > 0).sum()

    def _totals(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(-1, self.segment_ids, x)
