"""The loop's `Batcher`: groups to padded rollouts to updates, with the recipe's advantages and batch sizes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .algorithms.advantages import group_advantages
from .batching.pack import build_rollouts
from .batching.shard import split_updates
from .config.schema import Recipe
from .types import RolloutBatch, ScoredBatch, TrainBatch, TrajectoryGroup


class GrpoBatcher:
    """`pad_multiple` is what padded lengths divide by (`World.padding_multiple`)."""

    def __init__(self, recipe: Recipe, *, pad_id: int, pad_multiple: int):
        self._grpo = recipe.grpo
        self._train_global_batch_size = recipe.policy.train_global_batch_size
        self._pad_id = pad_id
        self._pad_multiple = pad_multiple

    def rollouts(self, groups: Sequence[TrajectoryGroup]) -> RolloutBatch:
        return build_rollouts(groups, pad_id=self._pad_id, pad_multiple=self._pad_multiple)

    def updates(self, scored: ScoredBatch) -> list[TrainBatch]:
        rollouts = scored.rollouts
        advantages = group_advantages(
            rollouts.rewards,
            rollouts.group_index,
            rollouts.sample_mask,
            leave_one_out=self._grpo.use_leave_one_out_baseline,
            normalize=self._grpo.normalize_rewards,
        )
        return split_updates(scored, advantages, train_global_batch_size=self._train_global_batch_size)
