"""The GRPO objective of one micro-batch, normalised by counts of the whole update.

Log-probs c (current, with gradient), p (old: trainer at the start of the step), g (generation), q (reference); A the
advantage; valid tokens: token mask and sample mask. With L the policy term and w = exp(p - g), which is data:

    loss = sum over valid tokens of  weight x (w L + kl_penalty x KL(q - c) - entropy_coef x entropy)

where weight is 1 / num_tokens, or for the sequence-level loss 1 / (tokens of the sequence x num_sequences). Both
counts are of the whole update, over all micro-batches and data-parallel ranks, so that parts add up and gradients of
ranks are SUMMED. Invalid tokens are replaced before any exp or product: junk there (-inf, NaN) reaches neither the
loss nor the gradient. The KL gradient is the estimator's plain derivative (see `kl`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kl import kl_estimate
from .loss_config import LossConfig
from .loss_inputs import LossInputs, Normalizer
from .loss_sums import LossSums
from .policy_term import PolicyTerms, policy_terms

__all__ = ["LossConfig", "LossInputs", "LossOutput", "LossSums", "Normalizer", "grpo_loss"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossOutput:
    """`loss` is this micro-batch's share of the update's loss; without valid tokens 0 with the graph kept."""

    loss: Tensor  # scalar, with gradient
    actor_loss: Tensor  # scalar share of the w L term, detached
    kl: Tensor  # scalar share of the KL estimate before its weight, detached; 0 without a reference
    sums: LossSums


def grpo_loss(config: LossConfig, inputs: LossInputs, normalizer: Normalizer) -> LossOutput:
    """Loss share, its parts and the metric sums of one micro-batch. Differentiable in c and the entropy.

    Raises ValueError when the configuration needs an array that `inputs` lacks.
    """
    _check(config, inputs)
    valid = inputs.valid
    terms = policy_terms(config, inputs)
    weight = _token_weights(config, inputs, valid, normalizer)
    actor_loss = loss = (weight * terms.importance_weight * terms.policy).sum()

    kl = _kl(config, inputs, valid)
    kl_share = torch.zeros_like(actor_loss) if kl is None else (weight * kl).sum()
    if config.uses_reference:
        loss = loss + config.reference_policy_kl_penalty * kl_share
    entropy = None if inputs.entropy is None else torch.where(valid, inputs.entropy, 0.0)
    if config.uses_entropy:
        loss = loss - config.entropy_coef * (weight * entropy).sum()
    return LossOutput(
        loss=loss,
        actor_loss=actor_loss.detach(),
        kl=kl_share.detach(),
        sums=LossSums.of(
            shares={"loss": loss, "actor_loss": actor_loss},
            token_metrics=_token_metrics(inputs, valid, terms, kl, entropy),
            valid=valid,
            num_sequences=inputs.sequences.count(valid),
        ),
    )


def _token_weights(config: LossConfig, inputs: LossInputs, valid: Tensor, normalizer: Normalizer) -> Tensor:
    """What each token's term is multiplied with [B, T]: 0 where invalid; sums to 1 over the whole update."""
    mask = valid.to(inputs.current_logprobs.dtype)
    if config.token_level_loss:
        return mask / max(normalizer.num_tokens, 1)
    return mask / inputs.sequences.lengths(valid) / max(normalizer.num_sequences, 1)


def _kl(config: LossConfig, inputs: LossInputs, valid: Tensor) -> Tensor | None:
    if inputs.reference_logprobs is None:
        return None
    return kl_estimate(
        torch.where(valid, inputs.reference_logprobs - inputs.current_logprobs, 0.0),
        config.reference_policy_kl_type,
        input_clamp=config.kl_input_clamp_value,
        output_clamp=config.kl_output_clamp_value,
    )


@torch.no_grad()
def _token_metrics(
    inputs: LossInputs, valid: Tensor, terms: PolicyTerms, kl: Tensor | None, entropy: Tensor | None
) -> dict[str, Tensor]:
    """Broadcastable to [B, T]; their sums over valid tokens become masked means."""
    log_weight = torch.where(valid, inputs.old_logprobs - inputs.generation_logprobs, 0.0)
    metrics = {
        "gen_kl_error": kl_estimate(log_weight, "k3"),
        "token_mult_prob_error": log_weight.abs().exp(),
        "sampling_importance_ratio": terms.raw_importance_weight,
        "probs_ratio": terms.ratio,
        "approx_entropy": -inputs.old_logprobs,
        "clip_fraction": terms.is_clipped,
    }
    optional = {"kl": kl, "entropy": entropy}
    return metrics | {name: metric for name, metric in optional.items() if metric is not None}


def _check(config: LossConfig, inputs: LossInputs) -> None:
    if config.uses_reference and inputs.reference_logprobs is None:
        raise ValueError("loss_fn.reference_policy_kl_penalty > 0 needs reference_logprobs")
    if config.uses_entropy and inputs.entropy is None:
        raise ValueError("loss_fn.entropy_coef > 0 needs the entropy of the policy's distribution")
