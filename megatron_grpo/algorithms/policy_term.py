"""The policy term L of every token and its importance weight, for PPO clipping, CISPO and both levels.

PPO: max(-A r, -A clamp(r)) equals -A r with r clamped on one side, chosen by the sign of A; the dual clip is the
other side where A < 0. The clamp acts on log r, so a ratio beyond the float range on the clipped side costs no NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .loss_config import LossConfig
from .loss_inputs import LossInputs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTerms:
    """Per-token terms, all broadcastable to [B, T]; invalid tokens hold neutral values. Only `policy` has gradient."""

    ratio: Tensor  # r, unclipped
    is_clipped: Tensor  # bool, the clip removed the token's gradient
    policy: Tensor  # L before the importance weight
    raw_importance_weight: Tensor  # w as measured
    importance_weight: Tensor  # w as applied: 1 without the correction, else truncated


def policy_terms(config: LossConfig, inputs: LossInputs) -> PolicyTerms:
    valid = inputs.valid
    advantages = torch.where(valid, inputs.token_advantages, 0.0)
    log_ratio = torch.where(valid, inputs.current_logprobs - inputs.old_logprobs, 0.0)
    if config.ratio_level == "sequence":
        log_ratio = inputs.sequences.spread_mean(log_ratio, valid).expand_as(valid)
    lowest, highest = _clip_bounds(config, advantages)
    clamped = torch.clamp(log_ratio, min=lowest, max=highest)
    if config.use_cispo:
        policy = -advantages * clamped.detach().exp() * torch.where(valid, inputs.current_logprobs, 0.0)
    else:
        policy = -advantages * clamped.exp()
    raw, applied = _importance_weights(config, inputs, valid)
    return PolicyTerms(
        ratio=log_ratio.detach().exp(),
        is_clipped=(clamped != log_ratio).detach(),
        policy=policy,
        raw_importance_weight=raw,
        importance_weight=applied,
    )


def _clip_bounds(config: LossConfig, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of log r per token [B, T]. PPO: the side to which the advantage pushes; CISPO: always both."""
    lower = math.log(1 - config.ratio_clip_min) if config.ratio_clip_min < 1 else -math.inf
    upper = math.log1p(config.ratio_clip_max)
    if config.use_cispo:
        return torch.full_like(advantages, lower), torch.full_like(advantages, upper)
    dual = math.inf if config.ratio_clip_c is None else math.log(config.ratio_clip_c)
    is_negative = advantages < 0
    lowest = torch.full_like(advantages, -math.inf).masked_fill(is_negative, lower)
    return lowest, torch.full_like(advantages, upper).masked_fill(is_negative, dual)


@torch.no_grad()
def _importance_weights(config: LossConfig, inputs: LossInputs, valid: Tensor) -> tuple[Tensor, Tensor]:
    """exp(p - g) as measured, and as applied after truncation."""
    log_weight = torch.where(valid, inputs.old_logprobs - inputs.generation_logprobs, 0.0)
    raw = (inputs.sequences.spread_sum(log_weight) if config.is_level == "sequence" else log_weight).exp()
    if not config.use_importance_sampling_correction:
        return raw, torch.ones_like(raw)
    kind, upper = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    lower = config.truncated_importance_sampling_ratio_min or 0.0
    if kind is None:
        return raw, raw
    if kind == "tis":
        return raw, raw.clamp(lower, upper)
    judged = inputs.sequences.spread_mean(log_weight, valid).exp() if kind == "seq-mask-tis" else raw
    return raw, torch.where((judged >= lower) & (judged <= upper), raw, 0.0)
