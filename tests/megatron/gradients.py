"""Log-probs, gradients and metrics of a policy in any layout, put together as one model's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_grpo.batching.shard import gather_rows
from megatron_grpo.layout import Gpu, Sizes, build_world
from tests.megatron.samples import VOCAB_SIZE, build_policy, own_rollouts, own_rows
from tests.megatron.world import run_world

RELATIVE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rank's shard `index` of `count` along `dim`, which holds `stride` parts cut one by one."""

    index: int
    count: int
    dim: int
    stride: int
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Outcome:
    logprobs: np.ndarray
    gradients: dict[str, np.ndarray]
    means: dict[str, float]
    norms: list[float]


def cut(size=1, **sizes):
    return build_world([Gpu(node=0, gpu=gpu) for gpu in range(size)], Sizes(**sizes))


def gradient_pieces(policy) -> dict[str, Piece]:
    """This rank's part of every gradient, summed over data-parallel ranks, by the tensor's name in the whole model."""
    from megatron_grpo.weight_sync.places import tensor_places

    for chunk in policy._model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            _undo_sharding(buffer)
    parameters = dict(policy.module.named_parameters())
    pieces = {}
    for place in tensor_places(policy.module, torch.distributed.get_rank()):
        if place.name not in parameters:
            continue
        ranks = place.tensor_parallel_group_ranks if place.is_tp else [place.owner_rank]
        pieces[place.resolved_name] = Piece(
            index=ranks.index(place.owner_rank),
            count=len(ranks),
            dim=place.partition_dim,
            stride=place.partition_stride,
            values=parameters[place.name].main_grad.numpy().copy(),
        )
    return pieces


def _undo_sharding(buffer) -> None:
    """The distributed optimizer leaves each rank only its own slice of the sum."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
        torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)


def merged(ranks: list[dict[str, Piece]]) -> dict[str, np.ndarray]:
    """All ranks' parts as one model; replicas must agree to the last bit."""
    shards: dict[str, dict[int, Piece]] = {}
    for rank in ranks:
        for name, piece in rank.items():
            first = shards.setdefault(name, {}).setdefault(piece.index, piece)
            np.testing.assert_array_equal(piece.values, first.values, err_msg=f"replicas of {name} differ")
    whole = {name: _joined(name, [pieces[index] for index in sorted(pieces)]) for name, pieces in shards.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in whole:
            assert not whole[name][VOCAB_SIZE:].any(), f"padded rows of {name} have gradients"
            whole[name] = whole[name][:VOCAB_SIZE]
    return whole


def _joined(name: str, pieces: list[Piece]) -> np.ndarray:
    first = pieces[0]
    assert len(pieces) == first.count, f"{name}: {len(pieces)} of {first.count} shards"
    parts = [np.split(piece.values, first.stride, first.dim) for piece in pieces]
    return np.concatenate([part[k] for k in range(first.stride) for part in parts], first.dim)


def score_and_differentiate(seat, recipe, rollouts, update):
    policy = build_policy(seat, recipe)
    scored = policy.score(own_rollouts(seat, rollouts))
    policy.optimizer.zero_grad()
    sums = policy._gradients(own_rows(seat, update))
    means = policy._means([sums])
    policy.optimizer.adam.prepare_grads()
    norm = float(policy.optimizer.adam.get_grad_norm())
    answer = policy.reports, scored.old_logprobs, gradient_pieces(policy), means, norm
    policy.close()
    return answer


def outcome(recipe, world, rollouts, update) -> Outcome:
    """What all ranks of `world` compute on `rollouts` and `update` together."""
    answers = run_world(score_and_differentiate, recipe, rollouts, update, world=world)
    reporting = [answer for answer in answers if answer[0]]
    assert len(reporting) == world.dp
    return Outcome(
        logprobs=gather_rows(
            [answer[1] for answer in reporting], lengths=rollouts.lengths, width=rollouts.tokens.shape[1]
        ),
        gradients=merged([answer[2] for answer in answers]),
        means=reporting[0][3],
        norms=[answer[4] for answer in answers],
    )


def assert_same(one: Outcome, other: Outcome, relative: float = RELATIVE) -> None:
    """Log-probs, gradients (relative to the largest element of each tensor), metrics and gradient norm."""
    assert np.abs(one.logprobs - other.logprobs).max() <= relative * np.abs(other.logprobs).max()
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in other.gradients.items():
        largest = np.abs(gradient).max()
        assert largest > 0, f"{name} has no gradient"
        assert np.abs(one.gradients[name] - gradient).max() <= relative * largest, name
    for name, value in other.means.items():
        assert one.means[name] == pytest.approx(value, rel=relative, abs=1e-6), name
    for norm in one.norms:
        assert norm == pytest.approx(other.norms[0], rel=relative)
