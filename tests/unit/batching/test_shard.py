"""A step's rows cut into updates, ranks and micro-batches, and put back together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batching.shard import (
    balanced_rows,
    gather_rows,
    micro_batches,
    rollout_micro_batches,
    shard_rollouts,
    shard_update,
    split_updates,
    stack_rows,
)
from tests.unit.batching.group_samples import scored_batch


def whole_update(scored):
    num_rows = scored.rollouts.num_rows
    (update,) = split_updates(scored, np.arange(num_rows), train_global_batch_size=num_rows)
    return update


def test_updates_are_consecutive_rows_with_their_own_counts():
    scored = scored_batch()
    rollouts = scored.rollouts
    updates = split_updates(scored, np.arange(12.0), train_global_batch_size=4)
    valid = rollouts.loss_mask & rollouts.sample_mask[:, None]
    for i, update in enumerate(updates):
        rows = slice(4 * i, 4 * i + 4)
        assert update.advantages.tolist() == list(range(4 * i, 4 * i + 4)) and update.advantages.dtype == np.float32
        assert update.num_valid_tokens == valid[rows].sum()
        assert update.num_valid_sequences == valid[rows].any(1).sum()
        assert np.array_equal(update.scored.rollouts.tokens, rollouts.tokens[rows])
        assert np.array_equal(update.scored.old_logprobs, scored.old_logprobs[rows])
        assert np.array_equal(update.scored.reference_logprobs, scored.reference_logprobs[rows])
    assert len(updates) == 3


def test_rows_that_do_not_divide_are_refused():
    scored = scored_batch()
    with pytest.raises(ValueError, match="12 rows.*train_global_batch_size = 5"):
        split_updates(scored, np.zeros(12), train_global_batch_size=5)
    with pytest.raises(ValueError, match="12 rows.*ranks = 8"):
        shard_rollouts(scored.rollouts, 8)


@settings(max_examples=50, deadline=None)
@given(per_rank=st.integers(1, 10), dp_size=st.integers(1, 5), seed=st.integers(0, 999))
def test_ranks_get_equally_many_rows_and_nearly_equally_many_tokens(per_rank, dp_size, seed):
    lengths = np.random.default_rng(seed).integers(1, 100, per_rank * dp_size)
    rows = balanced_rows(lengths, dp_size)
    assert sorted(np.concatenate(rows)) == list(range(len(lengths)))
    assert {len(r) for r in rows} == {per_rank}
    loads = [lengths[r].sum() for r in rows]
    assert max(loads) - min(loads) <= lengths.max() - lengths.min()
    assert all((np.diff(lengths[r]) <= 0).all() for r in rows)


def test_dealt_to_and_fro():
    assert [r.tolist() for r in balanced_rows(np.array([7, 9, 4, 6]), 2)] == [[1, 2], [0, 3]]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_scores_of_trimmed_micro_batches_come_back_in_order(dp_size, size):
    rollouts = scored_batch(pad_multiple=4).rollouts
    width = rollouts.tokens.shape[1]
    parts = []
    for shard in shard_rollouts(rollouts, dp_size):
        scores = [m.tokens * 2.0 for m in rollout_micro_batches(shard, size, pad_multiple=4)]
        parts.append(stack_rows(scores, width=max(s.shape[1] for s in scores)))
    gathered = gather_rows(parts, lengths=rollouts.lengths, width=width, fill=-1.0)
    is_token = np.arange(width) < rollouts.lengths[:, None]
    assert np.array_equal(gathered[is_token], rollouts.tokens[is_token] * 2.0)


@pytest.mark.parametrize("with_reference", [True, False])
def test_ranks_and_micro_batches_of_an_update_keep_its_rows_and_its_counts(with_reference):
    update = whole_update(scored_batch(pad_multiple=4, with_reference=with_reference))
    seen = []
    for shard in shard_update(update, 2):
        for micro in micro_batches(shard, 4, pad_multiple=4):
            assert micro.num_valid_tokens == update.num_valid_tokens
            assert micro.num_valid_sequences == update.num_valid_sequences
            rollouts = micro.scored.rollouts
            width = rollouts.tokens.shape[1]
            assert width % 4 == 0 and rollouts.lengths.max() <= width < rollouts.lengths.max() + 4
            rows = micro.advantages.astype(int)
            assert np.array_equal(rollouts.tokens, update.scored.rollouts.tokens[rows, :width])
            assert np.array_equal(micro.scored.old_logprobs, update.scored.old_logprobs[rows, :width])
            assert (micro.scored.reference_logprobs is not None) == with_reference
            seen.extend(rows)
    assert sorted(seen) == list(range(12))


def test_the_cut_never_removes_a_valid_token():
    update = whole_update(scored_batch(seed=5))
    valid = [
        (m.scored.rollouts.loss_mask & m.scored.rollouts.sample_mask[:, None]).sum() for m in micro_batches(update, 3)
    ]
    assert sum(valid) == update.num_valid_tokens
