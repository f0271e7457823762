"""From the recipe to what happens to a finished group before it is trained on: rewards rewritten, useless groups out."""

from __future__ import annotations

from ..algorithms.shaping import OverlongPenalty, RewardScaling, RewardTransform
from ..config.schema import Grpo
from ..replay.admission import Admission, AdmitAll, DynamicSampling


def reward_transforms(grpo: Grpo) -> tuple[RewardTransform, ...]:
    """In the order they apply: the penalty for length comes on top of the scaled reward."""
    transforms: list[RewardTransform] = []
    if grpo.reward_scaling.enabled:
        scaling = grpo.reward_scaling
        transforms.append(
            RewardScaling(
                source_min=scaling.source_min,
                source_max=scaling.source_max,
                target_min=scaling.target_min,
                target_max=scaling.target_max,
            )
        )
    if grpo.reward_shaping.enabled:
        shaping = grpo.reward_shaping
        transforms.append(
            OverlongPenalty(
                max_response_length=shaping.max_response_length,
                buffer_length=shaping.overlong_buffer_length,
                penalty=shaping.overlong_buffer_penalty,
            )
        )
    return tuple(transforms)


def admission(grpo: Grpo) -> Admission:
    if not grpo.use_dynamic_sampling:
        return AdmitAll()
    return DynamicSampling(
        num_prompts_per_step=grpo.num_prompts_per_step, max_gen_batches=grpo.dynamic_sampling_max_gen_batches
    )
