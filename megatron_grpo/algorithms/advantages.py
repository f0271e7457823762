"""Group-relative advantages.

A set of rewards is described by its mean and its sample (n-1) deviation. With the leave-one-out baseline the set of
a sample is the other samples of its group, else all of them. Groups are told apart by id, never by prompt text, and
rows of one group need not be neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RELATIVE_DEVIATION_FLOOR = 1e-6


def group_advantages(
    rewards: np.ndarray,
    group_index: np.ndarray,
    sample_mask: np.ndarray,
    *,
    leave_one_out: bool,
    normalize: bool,
) -> np.ndarray:
    """Advantages float64 [B] of rewards [B]; group ids [B] may be any integers; `sample_mask` [B] true: it trains.

    A masked sample gets 0 and shapes nobody's baseline. A group of one gives 0, equal rewards give exactly 0.
    With `normalize` the advantage is divided by the deviation of the same set, unless the set has fewer than two
    members or deviates by at most 1e-6 x max(1, the group's largest |reward|): [1, 0, 0, 0] with leave-one-out
    leaves the 1 at 1.0 (the others are equal) and divides -1/3 by the deviation of {1, 0, 0}.

    Raises ValueError on unequal lengths and on a reward that trains but is not finite.
    """
    valid = np.asarray(sample_mask, dtype=bool)
    values = np.where(valid, np.asarray(rewards, dtype=np.float64), 0.0)
    _check(values, np.asarray(group_index), valid)
    groups = _Groups.of(values, np.asarray(group_index), valid)
    advantages = groups.deviation_from_others() if leave_one_out else groups.centred
    if normalize:
        advantages = advantages / groups.divisor(leave_one_out)
    return np.where(valid, advantages, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """Statistics of every row's group, spread over the rows: all arrays [B]. Masked rows count as absent."""

    size: np.ndarray
    centred: np.ndarray  # reward minus the mean of the group
    sum_of_squares: np.ndarray  # of `centred`
    scale: np.ndarray  # largest |reward|, at least 1

    @classmethod
    def of(cls, values: np.ndarray, group_index: np.ndarray, valid: np.ndarray) -> _Groups:
        ids, row_group = np.unique(group_index, return_inverse=True)
        num_groups = len(ids)

        def spread_sum(x: np.ndarray) -> np.ndarray:
            return np.bincount(row_group, weights=np.where(valid, x, 0.0), minlength=num_groups)[row_group]

        lowest = np.full(num_groups, np.inf)
        np.minimum.at(lowest, row_group, np.where(valid, values, np.inf))
        largest = np.ones(num_groups)
        np.maximum.at(largest, row_group, np.where(valid, np.abs(values), 1.0))
        size = spread_sum(np.ones_like(values))
        # Measured from the lowest reward, equal rewards are exactly 0 and so is their mean: 0.1 + 0.1 + 0.1 is not 0.3.
        above = np.where(valid, values - np.where(size > 0, lowest[row_group], 0.0), 0.0)
        centred = np.where(valid, above - spread_sum(above) / np.maximum(size, 1), 0.0)
        return cls(size=size, centred=centred, sum_of_squares=spread_sum(centred**2), scale=largest[row_group])

    def deviation_from_others(self) -> np.ndarray:
        """r - mean of the others = (r - mean of all) n / (n - 1); a group of one has no others: 0."""
        return self.centred * self.size / np.maximum(self.size - 1, 1)

    def divisor(self, leave_one_out: bool) -> np.ndarray:
        """The sample deviation of the set, or 1 where it is not to be divided by."""
        sum_of_squares, members = self.sum_of_squares, self.size
        if leave_one_out:
            # Taking sample i away lowers the sum of squares by c_i^2 n / (n - 1). The rounding error of this
            # subtraction stays well below the floor, which is relative to the group's scale.
            sum_of_squares = np.maximum(sum_of_squares - self.centred * self.deviation_from_others(), 0.0)
            members = self.size - 1
        deviation = np.sqrt(sum_of_squares / np.maximum(members - 1, 1))
        divides = (members >= 2) & (deviation > RELATIVE_DEVIATION_FLOOR * self.scale)
        return np.where(divides, deviation, 1.0)


def _check(values: np.ndarray, group_index: np.ndarray, valid: np.ndarray) -> None:
    if not values.shape == group_index.shape == valid.shape or values.ndim != 1:
        raise ValueError(
            f"rewards, group_index and sample_mask must be one value per row, got shapes {values.shape}, "
            f"{group_index.shape}, {valid.shape}"
        )
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward of row {row} is {values[row]} but the row trains; mask rows with unusable rewards")
