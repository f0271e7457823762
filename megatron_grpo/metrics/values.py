"""Metric values that can be merged over micro-batches, ranks and steps without losing their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean that carries its count: merging 3 tokens with 5 tokens gives the mean of 8 tokens."""

    sum: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        items = [float(value) for value in values]
        return cls(sum=math.fsum(items), count=len(items))

    @property
    def value(self) -> float:
        """NaN when nothing was counted."""
        return self.sum / self.count if self.count else math.nan

    def merge(self, other: Mean) -> Mean:
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """A total."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(value=self.value + other.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Max:
    """The largest value seen; a NaN anywhere stays visible."""

    value: float

    def merge(self, other: Max) -> Max:
        if math.isnan(self.value) or math.isnan(other.value):
            return Max(value=math.nan)
        return Max(value=max(self.value, other.value))


Metric = Mean | Sum | Max


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge by name; a part that lacks a name does not count for it. TypeError when two kinds share a name."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            seen = merged.get(name)
            if seen is not None and type(seen) is not type(metric):
                raise TypeError(f"metric {name!r} is a {type(seen).__name__} here and a {type(metric).__name__} there")
            merged[name] = metric if seen is None else seen.merge(metric)
    return merged


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: float(metric.value) for name, metric in metrics.items()}
