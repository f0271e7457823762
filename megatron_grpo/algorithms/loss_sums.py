"""Metric sums of a loss that add over micro-batches, ranks and updates, and the means they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossSums:
    """Named sums as one float64 vector on the micro-batch's device, so that a single all-reduce adds the ranks.

    In order: `shares` (parts of the update's loss), sums of `token_metrics` over valid tokens, then the numbers of
    valid tokens and of sequences with at least one.
    """

    shares: tuple[str, ...]
    token_metrics: tuple[str, ...]
    values: Tensor  # float64 [len(shares) + len(token_metrics) + 2]

    @classmethod
    def of(
        cls,
        *,
        shares: Mapping[str, Tensor],
        token_metrics: Mapping[str, Tensor],
        valid: Tensor,
        num_sequences: Tensor,
    ) -> LossSums:
        """`token_metrics` [B, T] or broadcastable to it are summed where `valid`; the shares are scalars."""
        stacked = torch.stack([metric.to(torch.float64).expand_as(valid) for metric in token_metrics.values()])
        sums = torch.where(valid, stacked, 0.0).flatten(1).sum(1)
        scalars = [share.detach() for share in shares.values()]
        return cls(
            shares=tuple(shares),
            token_metrics=tuple(token_metrics),
            values=torch.cat([_vector(scalars), sums, _vector([valid.sum(), num_sequences])]),
        )

    def __add__(self, other: LossSums) -> LossSums:
        mine, theirs = (self.shares, self.token_metrics), (other.shares, other.token_metrics)
        assert mine == theirs, f"sums of different metrics: {mine} and {theirs}"
        return self.with_values(self.values + other.values)

    def with_values(self, values: Tensor) -> LossSums:
        """The same metrics with other numbers, as after an all-reduce."""
        return replace(self, values=values)

    def means(self, num_updates: int = 1) -> dict[str, float]:
        """Loss shares per update, token metrics per valid token (0 without any), and the two counts."""
        numbers = self.values.tolist()
        num_shares = len(self.shares)
        *token_sums, num_tokens, num_sequences = numbers[num_shares:]
        means = {name: value / num_updates for name, value in zip(self.shares, numbers, strict=False)}
        means |= {name: value / max(num_tokens, 1) for name, value in zip(self.token_metrics, token_sums, strict=True)}
        return means | {"num_valid_tokens": num_tokens, "num_valid_sequences": num_sequences}


def _vector(scalars: list[Tensor]) -> Tensor:
    return torch.stack([scalar.to(torch.float64) for scalar in scalars])
