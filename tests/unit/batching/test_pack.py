"""Padding groups to a batch, and packing sequences into rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batching.pack import build_rollouts, pack_rows
from tests.unit.batching.group_samples import PAD, random_groups


@pytest.mark.parametrize("pad_multiple", [1, 4, 16])
def test_every_trajectory_is_one_padded_row(pad_multiple):
    groups = random_groups()
    trajectories = [t for group in groups for t in group.trajectories]
    rollouts = build_rollouts(groups, pad_id=PAD, pad_multiple=pad_multiple)
    longest = max(len(t.token_ids) for t in trajectories)
    width = rollouts.tokens.shape[1]
    assert width % pad_multiple == 0 and longest <= width < longest + pad_multiple
    for row, trajectory in enumerate(trajectories):
        n = len(trajectory.token_ids)
        assert rollouts.lengths[row] == n
        for name in ("loss_mask", "generation_logprobs"):
            array = getattr(rollouts, name)
            assert array[row, :n].tolist() == getattr(trajectory, name).tolist() and not array[row, n:].any()
        assert rollouts.tokens[row].tolist() == [*trajectory.token_ids, *[PAD] * (width - n)]
        assert rollouts.rewards[row] == trajectory.reward
        assert rollouts.sample_mask[row] == (trajectory.masked_because is None)
    assert rollouts.group_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    dtypes = [rollouts.tokens.dtype, rollouts.generation_logprobs.dtype, rollouts.rewards.dtype]
    assert dtypes == [np.int64, np.float32, np.float64]


def test_two_groups_of_one_prompt_stay_two_groups():
    group = random_groups(1)[0]
    assert build_rollouts([group, group], pad_id=PAD).group_index.tolist() == [0] * 4 + [1] * 4


def test_no_rows_and_a_trained_first_token_are_refused():
    with pytest.raises(ValueError, match="0 groups"):
        build_rollouts([], pad_id=PAD)
    group = random_groups(1)[0]
    trajectory = group.trajectories[0]
    trained = replace(trajectory, loss_mask=np.ones_like(trajectory.loss_mask))
    with pytest.raises(AssertionError, match="first token"):
        build_rollouts([replace(group, trajectories=(trained,))], pad_id=PAD)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), spare=st.integers(0, 20))
def test_packing_loses_nothing_and_fits(lengths, spare):
    capacity = max(lengths) + spare
    plan = pack_rows(lengths, capacity)
    assert sorted(i for row in plan.rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in plan.rows)
    fills = sorted(sum(lengths[i] for i in row) for row in plan.rows)
    assert len(fills) < 2 or fills[0] + fills[1] > capacity  # first fit never leaves two rows that fit into one
    for r, row in enumerate(plan.rows):
        starts = plan.cu_seqlens[r]
        assert np.diff(starts).tolist() == [lengths[i] for i in row]
        for segment, (start, index) in enumerate(zip(starts, row, strict=False)):
            place = slice(start, start + lengths[index])
            assert (plan.source_row[r, place] == index).all() and (plan.segment_ids[r, place] == segment).all()
            assert plan.positions[r, place].tolist() == list(range(lengths[index]))
        assert (plan.source_row[r, starts[-1] :] == -1).all()
        assert (plan.segment_ids[r, starts[-1] :] == len(row)).all()  # padding belongs to no sequence
    assert plan.segment_ids.max() < capacity


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), spare=st.integers(0, 20))
def test_unpacking_undoes_packing(lengths, spare):
    plan = pack_rows(lengths, max(lengths) + spare)
    values = np.random.default_rng(0).random((len(lengths), 12))
    kept = np.where(np.arange(12) < np.array(lengths)[:, None], values, -1.0)
    assert np.array_equal(plan.unpack(plan.pack(values, np.nan), width=12, fill=-1.0), kept)
    per_sequence = plan.pack(np.arange(len(lengths)), -1)
    assert np.array_equal(per_sequence, plan.source_row)


def test_longest_first():
    assert pack_rows([3, 5, 2, 7], 8).rows == ((3,), (1, 0), (2,))


@pytest.mark.parametrize("lengths", [[3, 9], [3, 0]])
def test_a_sequence_that_no_row_can_hold_is_named(lengths):
    with pytest.raises(ValueError, match=f"sequence 1 has {lengths[1]} tokens"):
        pack_rows(lengths, 8)
