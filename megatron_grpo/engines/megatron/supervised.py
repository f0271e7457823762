"""Cuts warm-start batches: rows of a rank, and micro-batches of those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...batching.pack import round_up
from ...types import SupervisedBatch


def rows_of_rank(batch: SupervisedBatch, dp_rank: int, dp_size: int) -> SupervisedBatch:
    """Every `dp_size`-th row from `dp_rank` on. Raises ValueError when a rank would get none."""
    if len(batch.lengths) < dp_size:
        raise ValueError(f"warm_start.batch_size {len(batch.lengths)} leaves some of {dp_size} ranks without a row")
    return _take(batch, np.arange(dp_rank, len(batch.lengths), dp_size), batch.tokens.shape[1])


def supervised_micro_batches(batch: SupervisedBatch, size: int, *, pad_multiple: int) -> Sequence[SupervisedBatch]:
    """At most `size` rows each, cut to the longest of them rounded up to `pad_multiple`."""
    cuts = [np.arange(start, min(start + size, len(batch.lengths))) for start in range(0, len(batch.lengths), size)]
    return [_take(batch, rows, round_up(int(batch.lengths[rows].max()), pad_multiple)) for rows in cuts]


def _take(batch: SupervisedBatch, rows: np.ndarray, width: int) -> SupervisedBatch:
    missing = max(0, width - batch.tokens.shape[1])
    return SupervisedBatch(
        tokens=np.pad(batch.tokens[rows, :width], ((0, 0), (0, missing))),
        lengths=batch.lengths[rows],
        loss_mask=np.pad(batch.loss_mask[rows, :width], ((0, 0), (0, missing))),
    )
