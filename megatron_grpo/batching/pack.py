"""Groups as padded arrays, and a plan that packs sequences into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..types import RolloutBatch, Trajectory, TrajectoryGroup


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def build_rollouts(groups: Sequence[TrajectoryGroup], *, pad_id: int, pad_multiple: int = 1) -> RolloutBatch:
    """All trajectories in order, padded on the right to the longest, rounded up to `pad_multiple`.

    `group_index` is the group's place in `groups`: two groups with the same prompt text stay two groups.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        raise ValueError(f"{len(groups)} groups hold no trajectory")
    for trajectory in trajectories:
        _check(trajectory)
    lengths = np.array([len(trajectory.token_ids) for trajectory in trajectories], dtype=np.int64)
    is_token = np.arange(round_up(int(lengths.max()), pad_multiple)) < lengths[:, None]
    return RolloutBatch(
        tokens=_padded(is_token, [t.token_ids for t in trajectories], pad_id, np.int64),
        lengths=lengths,
        loss_mask=_padded(is_token, [t.loss_mask for t in trajectories], False, np.bool_),
        sample_mask=np.array([t.masked_because is None for t in trajectories], dtype=np.bool_),
        generation_logprobs=_padded(is_token, [t.generation_logprobs for t in trajectories], 0.0, np.float32),
        rewards=np.array([t.reward for t in trajectories], dtype=np.float64),
        group_index=np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups]),
    )


def _padded(is_token: np.ndarray, rows: list[np.ndarray], fill: float, dtype: type) -> np.ndarray:
    array = np.full(is_token.shape, fill, dtype=dtype)
    array[is_token] = np.concatenate(rows)
    return array


def _check(trajectory: Trajectory) -> None:
    lengths = {
        len(trajectory.token_ids),
        len(trajectory.loss_mask),
        len(trajectory.generation_logprobs),
        len(trajectory.token_versions),
    }
    assert len(lengths) == 1, f"a trajectory's arrays have different lengths: {sorted(lengths)}"
    assert not trajectory.loss_mask[:1].any(), "the first token of a row has no prediction and cannot train"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackPlan:
    """Where each packed token comes from. R packed rows of `capacity` tokens; padding has source row -1.

    `segment_ids` number the sequences of a row from 0 (padding takes the next free number), which is what the loss
    needs for per-sequence terms; `positions` restart at 0 in every sequence.
    """

    rows: tuple[tuple[int, ...], ...]  # sequence indices of each packed row, in place order
    source_row: np.ndarray  # int64 [R, capacity]
    positions: np.ndarray  # int64 [R, capacity]
    segment_ids: np.ndarray  # int64 [R, capacity]
    cu_seqlens: tuple[np.ndarray, ...]  # int32 per packed row: starts of its sequences and the end of the last

    def pack(self, values: np.ndarray, fill: float) -> np.ndarray:
        """Per-token [B, T] or per-sequence [B] values -> [R, capacity]."""
        picked = values[self.source_row] if values.ndim == 1 else values[self.source_row, self.positions]
        return np.where(self.source_row >= 0, picked, np.asarray(fill, dtype=values.dtype))

    def unpack(self, packed: np.ndarray, *, width: int, fill: float) -> np.ndarray:
        """[R, capacity] -> [B, width] in the original order."""
        num_sequences = sum(len(row) for row in self.rows)
        values = np.full((num_sequences, width), fill, dtype=packed.dtype)
        is_token = self.source_row >= 0
        values[self.source_row[is_token], self.positions[is_token]] = packed[is_token]
        return values


def pack_rows(lengths: Sequence[int] | np.ndarray, capacity: int) -> PackPlan:
    """First-fit decreasing: the longest sequence first, each into the first row with room (<= 11/9 of the optimum).

    Raises ValueError on an empty sequence or one longer than `capacity`, naming it.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    for index in np.flatnonzero((lengths > capacity) | (lengths < 1)):
        raise ValueError(f"sequence {index} has {lengths[index]} tokens, a packed row holds 1 to {capacity}")
    rows: list[list[int]] = []
    room = np.full(len(lengths), capacity)  # of every row that could be opened
    for index in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(room[: len(rows) + 1] >= lengths[index]))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(index))
        room[row] -= lengths[index]
    return _plan(rows, lengths, capacity)


def _plan(rows: list[list[int]], lengths: np.ndarray, capacity: int) -> PackPlan:
    shape = (len(rows), capacity)
    source_row, positions, segment_ids = np.full(shape, -1), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    boundaries = []
    for r, row in enumerate(rows):
        sizes = lengths[row]
        ends = np.cumsum(sizes)
        filled = int(ends[-1])
        source_row[r, :filled] = np.repeat(row, sizes)
        positions[r, :filled] = np.arange(filled) - np.repeat(ends - sizes, sizes)
        segment_ids[r] = len(row)
        segment_ids[r, :filled] = np.repeat(np.arange(len(row)), sizes)
        boundaries.append(np.concatenate([[0], ends]).astype(np.int32))
    return PackPlan(
        rows=tuple(map(tuple, rows)),
        source_row=source_row,
        positions=positions,
        segment_ids=segment_ids,
        cu_seqlens=tuple(boundaries),
    )
