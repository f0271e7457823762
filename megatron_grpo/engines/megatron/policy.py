"""One rank of the trainer: scores rollouts, trains on them, and lends its model to a colocated engine.

Every method is collective over the world: all ranks call it, in the same order, one at a time. Ranks of one
data-parallel shard get the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode

from ...algorithms.loss import LossConfig, LossSums
from ...batching.shard import micro_batches, rollout_micro_batches, stack_rows
from ...errors import RunFailed
from ...platform.device import Accelerator
from ...types import RolloutBatch, ScoredBatch, SupervisedBatch, TrainBatch, TrainResult
from .chunks import as_one_module
from .model import build_chunks
from .optimizer import PolicyOptimizer, data_parallel
from .parallel import close_world, init_world, is_shard_representative
from .reference import FrozenWeights
from .supervised import rows_of_rank, supervised_micro_batches
from .train_step import connect_schedule, grpo_gradients, score_micro_batches, supervised_gradients

if TYPE_CHECKING:
    from ...config.schema import Recipe
    from ...layout import World


class Rendezvous(Protocol):
    """Where the ranks of a world meet."""

    host: str
    port: int


class MegatronPolicy:
    """The model, its optimizer and the reference weights (only when the KL weight is above 0) of one rank.

    Construction joins the world. `module` is the bare model (all chunks of an interleaved pipeline in one), whose
    parameters are updated in place for ever: an engine may hold on to them. `reports` says whether this rank answers for its data-parallel shard; the results of the other
    ranks repeat it or, on earlier pipeline stages, are empty.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        rank: int,
        rendezvous: Rendezvous,
        *,
        vocab_size: int,
        accelerator: Accelerator,
    ):
        init_world(
            world, rank, rendezvous.host, rendezvous.port, accelerator, recipe.timeouts.actor_start, recipe.grpo.seed
        )
        self._recipe = recipe
        self.world = world
        self._device = accelerator.device
        self._loss = LossConfig.from_recipe(recipe.loss_fn)
        self._temperature = recipe.policy.generation.temperature
        self.reports = is_shard_representative()
        chunks = build_chunks(recipe, world, vocab_size, accelerator)
        self.module = as_one_module(chunks)
        self._model = data_parallel(chunks, recipe)
        connect_schedule(self._model)
        self.optimizer = PolicyOptimizer(recipe, self._model)
        self.reference = self._freeze_reference()
        self.enter_training()

    def score(self, rollouts: RolloutBatch) -> ScoredBatch:
        """Log-probs of this shard's rows under the weights now and, with a KL weight, under the reference."""
        batches = rollout_micro_batches(
            rollouts, self._recipe.policy.logprob_batch_size, pad_multiple=self.world.padding_multiple
        )
        reference = None
        if self.reference is not None:
            with self.reference.in_place():
                reference = self._logprobs(batches, rollouts.tokens.shape)
        return ScoredBatch(
            rollouts=rollouts,
            old_logprobs=self._logprobs(batches, rollouts.tokens.shape),
            reference_logprobs=reference,
        )

    def train(self, updates: Sequence[TrainBatch]) -> TrainResult:
        """One optimizer update per element, on this shard's rows of it.

        Raises RunFailed, before the optimizer sees it, for an update without valid tokens and for a gradient norm that
        is not finite.
        """
        sums, norms, rate = [], [], self.optimizer.learning_rate
        for number, update in enumerate(updates):
            if update.num_valid_tokens == 0:
                raise RunFailed(
                    f"update {number + 1} of {len(updates)} has no valid token: every sample is masked (overlong, "
                    "failed reward) or empty; see the masked counts of this step"
                )
            self.optimizer.zero_grad()
            sums.append(self._gradients(update))
            rate = self.optimizer.learning_rate
            norms.append(self.optimizer.update())
        metrics = self._means(sums) | {"grad_norm": float(np.mean(norms))}
        return TrainResult(metrics=metrics, num_updates=len(updates), learning_rate=rate)

    def supervised_step(self, batch: SupervisedBatch, lr: float) -> float:
        """One update on the cross-entropy of the WHOLE batch, of which this rank takes its share of rows.

        Returns the loss per token over all ranks. The schedule does not move.
        """
        num_tokens = int(batch.loss_mask.sum())
        if num_tokens == 0:
            raise RunFailed("a warm-start batch has no token to learn from")
        own = rows_of_rank(batch, parallel_state.get_data_parallel_rank(), self.world.dp)
        cut = supervised_micro_batches(
            own, self._recipe.policy.train_micro_batch_size, pad_multiple=self.world.padding_multiple
        )
        self.optimizer.zero_grad()
        share = supervised_gradients(self._model, cut, num_tokens, self._device)
        self.optimizer.update_at(lr)
        return float("nan") if share is None else float(self._sum_over_shards(share))

    def warm_start(self, batches: Sequence[SupervisedBatch], lr: float) -> list[float]:
        """A supervised step per batch; the losses in order."""
        return [self.supervised_step(batch, lr) for batch in batches]

    def finish_warm_start(self) -> None:
        """Reinforcement learning starts here: fresh moments and schedule; the weights now are the reference."""
        self.optimizer.reset()
        self.reference = self._freeze_reference()

    def enter_training(self) -> None:
        """Before scoring or training, with a colocated engine asleep: it leaves its mark in the process."""
        InferenceMode.unset_active()
        for chunk in self._model:
            chunk.train()

    def enter_generation(self) -> None:
        """Before a colocated engine wakes: its attention refuses a model in training mode."""
        self.module.eval()
        InferenceMode.set_active()

    def close(self) -> None:
        close_world()

    def _freeze_reference(self) -> FrozenWeights | None:
        return FrozenWeights(self.module) if self._loss.uses_reference else None

    def _logprobs(self, batches: Sequence[RolloutBatch], shape: tuple[int, int]) -> np.ndarray:
        parts = score_micro_batches(self._model, batches, self._temperature, self._device)
        return stack_rows(parts, width=shape[1]) if parts else np.zeros(shape, np.float32)

    def _gradients(self, update: TrainBatch) -> LossSums | None:
        cut = micro_batches(
            update, self._recipe.policy.train_micro_batch_size, pad_multiple=self.world.padding_multiple
        )
        return grpo_gradients(self._model, cut, self._loss, self._temperature, self._device)

    def _means(self, sums: Sequence[LossSums | None]) -> dict[str, float]:
        known = [one for one in sums if one is not None]
        if not known:
            return {}
        total = sum(known[1:], known[0])
        return total.with_values(self._sum_over_shards(total.values)).means(len(known))

    def _sum_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return values
