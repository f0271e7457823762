"""Which checkpoints stay. Pure: steps and metric values in, steps out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """A complete checkpoint; `metric` is None where it was not measured."""

    step: int
    metric: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """`checkpointing.keep_top_k`, `metric_name`, `higher_is_better`, `save_period`. `keep_top_k` None keeps all."""

    keep_top_k: int | None
    metric_name: str | None
    higher_is_better: bool
    save_period: int

    def steps_to_keep(self, saved: Sequence[SavedStep]) -> set[int]:
        """The best of those at a multiple of the period (ties, and those without a value: the newer), and the latest.

        Saves between two periods (a signal, a deadline) exist to resume from: they stay while they are the latest.
        Example, k = 1, period 10: 10 (.5), 20 (.5), 23 (.9) keep 20 and 23.
        """
        if self.keep_top_k is None or not saved:
            return {one.step for one in saved}
        aligned = [one for one in saved if one.step % self.save_period == 0]
        best = sorted(aligned, key=self._rank, reverse=True)[: self.keep_top_k]
        return {one.step for one in best} | {max(one.step for one in saved)}

    def _rank(self, saved: SavedStep) -> tuple[float, int]:
        if saved.metric is None or math.isnan(saved.metric):
            return (-math.inf, saved.step)
        return (saved.metric if self.higher_is_better else -saved.metric, saved.step)
