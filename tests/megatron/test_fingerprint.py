"""Checksums against their definition, over all ways to cut a tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.weight_sync import fingerprint
from megatron_grpo.weight_sync.fingerprint import Cut, RankSums, ShardSum, checksum, differences


def loop_checksum(tensor):
    bits = tensor.contiguous().view(fingerprint.BIT_TYPES[tensor.element_size()]).flatten().tolist()
    return sum(bit * (2 * i + 1) for i, bit in enumerate(bits)) % 2**64


def pieces(tensor, count, dim, stride):
    """Shards as tensor parallelism makes them: each of `stride` parts is cut into `count`."""
    parts = tensor.chunk(stride, dim)
    return [torch.cat([part.chunk(count, dim)[rank] for part in parts], dim) for rank in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3),
    count=st.sampled_from([1, 2, 4]),
    stride=st.sampled_from([1, 2]),
    dim=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 9),
    at_once=st.sampled_from([1, 7, 1 << 24]),
)
def test_shards_of_any_cut_add_up_to_the_whole(shape, count, stride, dim, dtype, seed, at_once):
    dim %= len(shape)
    shape[dim] *= 2
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "ELEMENTS_AT_ONCE", at_once)
        shards = [
            checksum(shard, Cut(index=rank, count=count, dim=dim, stride=stride))
            for rank, shard in enumerate(pieces(tensor, count, dim, stride))
        ]
    assert sum(shards) % 2**64 == loop_checksum(tensor)


def test_scalars_and_empty_tensors_have_a_checksum():
    assert checksum(torch.tensor(1.5), Cut()) == loop_checksum(torch.tensor([1.5]))
    assert checksum(torch.empty(0, 3), Cut()) == 0


def test_swapped_rows_and_one_changed_bit_show():
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    whole = checksum(tensor, Cut())
    assert checksum(tensor[[1, 0, 2, 3, 4, 5]], Cut()) != whole
    changed = tensor.clone()
    changed.view(torch.int32)[3, 2] ^= 1
    assert checksum(changed, Cut()) != whole


def rank_sums(rank, **sums):
    return RankSums(rank=rank, sums={name: ShardSum(index=i, count=n, value=v) for name, (i, n, v) in sums.items()})


def test_equal_weights_have_no_differences_whatever_the_cut():
    sent = [rank_sums(0, w=(0, 2, 7), b=(0, 1, 3)), rank_sums(1, w=(1, 2, 2**64 - 2), b=(0, 1, 3))]
    assert differences(sent, [rank_sums(2, w=(0, 1, 5), b=(0, 1, 3))]) == []


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([rank_sums(1, w=(0, 1, 6))], "w: checksum sent"),
        ([rank_sums(1, w=(0, 1, 5)), rank_sums(2, w=(0, 1, 6))], "engine rank 2 differs from another replica"),
        ([rank_sums(1, w=(1, 2, 5))], "1 of 2 shards"),
        ([rank_sums(1, v=(0, 1, 5))], "only the sender has it"),
    ],
)
def test_what_differs_is_named(held, message):
    problems = differences([rank_sums(0, w=(0, 1, 5))], held)
    assert any(message in problem for problem in problems), problems
