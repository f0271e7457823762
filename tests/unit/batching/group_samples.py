"""Small random trajectory groups and the scored batch they make."""

import numpy as np

from megatron_grpo.batching.pack import build_rollouts
from megatron_grpo.types import Problem, Prompt, ScoredBatch, Trajectory, TrajectoryGroup

PAD = 99


def random_groups(num_groups=3, group_size=4, seed=0):
    rng = np.random.default_rng(seed)
    return [_group(rng, ordinal, group_size) for ordinal in range(num_groups)]


def _group(rng, ordinal, group_size):
    prompt_ids = rng.integers(0, 50, rng.integers(1, 5))
    return TrajectoryGroup(
        ordinal=ordinal,
        prompt=Prompt(
            ordinal=ordinal,
            token_ids=tuple(prompt_ids.tolist()),
            env_name="sort",
            problem=Problem(question="same text", answer=""),
        ),
        trajectories=tuple(_trajectory(rng, prompt_ids) for _ in range(group_size)),
        generation_version=0,
        target_step=0,
    )


def _trajectory(rng, prompt_ids):
    num_generated = int(rng.integers(1, 9))
    zeros = np.zeros(len(prompt_ids))
    return Trajectory(
        token_ids=np.concatenate([prompt_ids, rng.integers(0, 50, num_generated)]).astype(np.int32),
        loss_mask=np.concatenate([zeros, np.ones(num_generated)]).astype(bool),
        generation_logprobs=np.concatenate([zeros, -rng.random(num_generated)]).astype(np.float32),
        token_versions=np.concatenate([zeros - 1, np.zeros(num_generated)]).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        finish_reason="stop",
        masked_because="overlong" if rng.random() < 0.2 else None,
    )


def scored_batch(num_groups=3, group_size=4, seed=0, pad_multiple=1, with_reference=True):
    rollouts = build_rollouts(random_groups(num_groups, group_size, seed), pad_id=PAD, pad_multiple=pad_multiple)
    rng = np.random.default_rng(seed + 1)
    old = rng.random(rollouts.tokens.shape).astype(np.float32)
    return ScoredBatch(rollouts=rollouts, old_logprobs=old, reference_logprobs=old - 1 if with_reference else None)
