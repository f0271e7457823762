"""A tiny policy's recipe and random rollouts for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from megatron_grpo.batching.shard import shard_rollouts, shard_update, split_updates
from megatron_grpo.config.schema import Recipe
from megatron_grpo.types import RolloutBatch, ScoredBatch, SupervisedBatch, TrainBatch
from tests.megatron.world import Seat

VOCAB_SIZE = 47  # no multiple of 8: some ids are padding
PROMPT_LENGTH = 5
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def tiny_recipe(
    *,
    model: dict[str, Any] | None = None,
    loss_fn: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    temperature: float = 1.0,
    **policy: Any,
) -> Recipe:
    """Float32, micro-batches of 4, no KL term, the schedule at its full rate at once."""
    loss = {"reference_policy_kl_penalty": 0.0, "entropy_coef": 0.01, "use_importance_sampling_correction": True}
    return Recipe.model_validate(
        {
            "loss_fn": loss | (loss_fn or {}),
            "policy": {
                "precision": "float32",
                "model_config": MODEL | (model or {}),
                "train_micro_batch_size": 4,
                "train_global_batch_size": 16,
                "generation": {"temperature": temperature},
                "megatron_cfg": (parallel or {}) | {
                    "optimizer": {"lr": 1e-3} | (optimizer or {}),
                    "scheduler": {"lr_warmup_iters": 0} | (scheduler or {}),
                },
            }
            | policy,
        }
    )


def random_rollouts(num_rows: int = 16, width: int = 14, seed: int = 0) -> RolloutBatch:
    """Rows of uneven length, the last two masked as whole samples."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(PROMPT_LENGTH + 1, width + 1, num_rows)
    columns = np.arange(width)
    is_token = columns < lengths[:, None]
    loss_mask = is_token & (columns >= PROMPT_LENGTH)
    return RolloutBatch(
        tokens=np.where(is_token, draw.integers(0, VOCAB_SIZE, (num_rows, width)), 0),
        lengths=lengths,
        loss_mask=loss_mask,
        sample_mask=np.arange(num_rows) < num_rows - 2,
        generation_logprobs=np.where(loss_mask, draw.normal(-4.0, 0.3, (num_rows, width)), 0.0).astype(np.float32),
        rewards=draw.normal(size=num_rows),
        group_index=np.arange(num_rows) // 4,
    )


def random_update(rollouts: RolloutBatch, seed: int = 1, with_reference: bool = False) -> TrainBatch:
    """One update on all rows, with off-policy log-probs, so that ratios differ from 1 and some are clipped."""
    draw = np.random.default_rng(seed)

    def near_generation() -> np.ndarray:
        noise = draw.normal(0.0, 0.2, rollouts.tokens.shape)
        return np.where(rollouts.loss_mask, rollouts.generation_logprobs + noise, 0.0).astype(np.float32)

    scored = ScoredBatch(
        rollouts=rollouts,
        old_logprobs=near_generation(),
        reference_logprobs=near_generation() if with_reference else None,
    )
    advantages = draw.normal(size=rollouts.num_rows)
    (update,) = split_updates(scored, advantages, train_global_batch_size=rollouts.num_rows)
    return update


def random_solutions(num_rows: int = 12, width: int = 10, seed: int = 2) -> SupervisedBatch:
    rollouts = random_rollouts(num_rows, width, seed)
    return SupervisedBatch(tokens=rollouts.tokens, lengths=rollouts.lengths, loss_mask=rollouts.loss_mask)


def own_rows(seat: Seat, update: TrainBatch) -> TrainBatch:
    return shard_update(update, seat.world.dp)[seat.world.ranks[seat.rank].dp]


def own_rollouts(seat: Seat, rollouts: RolloutBatch) -> RolloutBatch:
    return shard_rollouts(rollouts, seat.world.dp)[seat.world.ranks[seat.rank].dp]


def build_policy(seat: Seat, recipe: Recipe):
    from megatron_grpo.engines.megatron.policy import MegatronPolicy

    return MegatronPolicy(
        recipe, seat.world, seat.rank, seat.rendezvous, vocab_size=VOCAB_SIZE, accelerator=seat.accelerator
    )


def without_samples(update: TrainBatch) -> TrainBatch:
    """`update` with every sample masked."""
    scored = update.scored
    rollouts = dataclasses.replace(scored.rollouts, sample_mask=np.zeros_like(scored.rollouts.sample_mask))
    return dataclasses.replace(
        update, scored=dataclasses.replace(scored, rollouts=rollouts), num_valid_tokens=0, num_valid_sequences=0
    )
