"""Rows of a step -> updates -> data-parallel ranks -> micro-batches, and scored rows back in their order.

Every cut keeps whole rows. Ranks get equally many rows of nearly equally many tokens, longest rows first, so that
neighbours in a micro-batch pad little and a row that does not fit into memory fails in the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..types import RolloutBatch, ScoredBatch, TrainBatch
from .pack import round_up


def split_updates(scored: ScoredBatch, advantages: np.ndarray, *, train_global_batch_size: int) -> list[TrainBatch]:
    """Consecutive runs of `train_global_batch_size` rows, each with the counts its loss is divided by.

    `advantages` [B]. Raises ValueError when the rows do not divide evenly.
    """
    rollouts = scored.rollouts
    _check_divides(rollouts.num_rows, train_global_batch_size, "policy.train_global_batch_size")
    valid_per_row = (rollouts.loss_mask & rollouts.sample_mask[:, None]).sum(1)
    rows_of_updates = np.arange(rollouts.num_rows).reshape(-1, train_global_batch_size)
    return [
        TrainBatch(
            scored=_take_scored(scored, rows),
            advantages=advantages[rows].astype(np.float32),
            num_valid_tokens=int(valid_per_row[rows].sum()),
            num_valid_sequences=int((valid_per_row[rows] > 0).sum()),
        )
        for rows in rows_of_updates
    ]


def balanced_rows(lengths: np.ndarray, dp_size: int) -> list[np.ndarray]:
    """Row indices of each rank: rows by falling length, dealt to and fro. A pure function of its arguments.

    Lengths 9 7 6 4 over two ranks: rank 0 gets 9 4, rank 1 gets 7 6. Raises ValueError when rows do not divide.
    """
    _check_divides(len(lengths), dp_size, "data-parallel ranks")
    deal = np.argsort(-lengths, kind="stable").reshape(-1, dp_size)
    deal[1::2] = deal[1::2, ::-1]
    return list(deal.T)


def shard_rollouts(rollouts: RolloutBatch, dp_size: int) -> list[RolloutBatch]:
    """One batch per rank in `balanced_rows` order."""
    return [_take_rollouts(rollouts, rows) for rows in balanced_rows(rollouts.lengths, dp_size)]


def shard_update(batch: TrainBatch, dp_size: int) -> list[TrainBatch]:
    """One batch per rank; the counts stay those of the whole update."""
    return [_take_update(batch, rows) for rows in balanced_rows(batch.scored.rollouts.lengths, dp_size)]


def gather_rows(parts: Sequence[np.ndarray], *, lengths: np.ndarray, width: int, fill: float = 0.0) -> np.ndarray:
    """Undo `shard_rollouts`: per-rank arrays [b, t <= width] -> [B, width] in the order of `lengths`."""
    stacked = stack_rows(parts, width=width, fill=fill)
    gathered = np.empty_like(stacked)
    gathered[np.concatenate(balanced_rows(lengths, len(parts)))] = stacked
    return gathered


def stack_rows(parts: Sequence[np.ndarray], *, width: int, fill: float = 0.0) -> np.ndarray:
    """Arrays [b, t <= width] one below the other, padded on the right: scores of micro-batches made one again."""
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts])


def rollout_micro_batches(rollouts: RolloutBatch, size: int, *, pad_multiple: int = 1) -> list[RolloutBatch]:
    """At most `size` neighbouring rows each, cut to the longest of them rounded up to `pad_multiple`."""
    return [
        _take_rollouts(rollouts, rows, _width(rollouts, rows, pad_multiple))
        for rows in _neighbours(rollouts.num_rows, size)
    ]


def micro_batches(batch: TrainBatch, size: int, *, pad_multiple: int = 1) -> list[TrainBatch]:
    """As `rollout_micro_batches`; the counts stay those of the whole update."""
    rollouts = batch.scored.rollouts
    return [
        _take_update(batch, rows, _width(rollouts, rows, pad_multiple)) for rows in _neighbours(rollouts.num_rows, size)
    ]


def _neighbours(num_rows: int, size: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _width(rollouts: RolloutBatch, rows: np.ndarray, pad_multiple: int) -> int:
    return min(round_up(int(rollouts.lengths[rows].max()), pad_multiple), rollouts.tokens.shape[1])


def _take_rollouts(rollouts: RolloutBatch, rows: np.ndarray, width: int | None = None) -> RolloutBatch:
    return RolloutBatch(
        tokens=rollouts.tokens[rows, :width],
        lengths=rollouts.lengths[rows],
        loss_mask=rollouts.loss_mask[rows, :width],
        sample_mask=rollouts.sample_mask[rows],
        generation_logprobs=rollouts.generation_logprobs[rows, :width],
        rewards=rollouts.rewards[rows],
        group_index=rollouts.group_index[rows],
    )


def _take_scored(scored: ScoredBatch, rows: np.ndarray, width: int | None = None) -> ScoredBatch:
    reference = scored.reference_logprobs
    return ScoredBatch(
        rollouts=_take_rollouts(scored.rollouts, rows, width),
        old_logprobs=scored.old_logprobs[rows, :width],
        reference_logprobs=None if reference is None else reference[rows, :width],
    )


def _take_update(batch: TrainBatch, rows: np.ndarray, width: int | None = None) -> TrainBatch:
    return replace(batch, scored=_take_scored(batch.scored, rows, width), advantages=batch.advantages[rows])


def _check_divides(num_rows: int, divisor: int, what: str) -> None:
    if num_rows % divisor:
        raise ValueError(f"{num_rows} rows do not divide evenly by {what} = {divisor}")
