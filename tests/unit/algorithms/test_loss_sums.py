"""The reported metrics against their definitions, written out for one batch."""

import math

import pytest
import torch

from megatron_grpo.algorithms.loss import LossConfig, LossInputs, Normalizer, grpo_loss

C, P, G, Q = [-1.0, -2.0, -0.5], [-1.5, -1.9, -0.5], [-1.4, -1.8, -0.9], [-1.1, -2.0, -0.7]
A = [1.0, 1.0, -1.0]


def one_row_of_three_and_a_masked_row(config):
    nan = float("nan")

    def rows(values):
        return torch.tensor([[nan, *values], [0.3] * 4], dtype=torch.float64)

    inputs = LossInputs(
        current_logprobs=rows(C).requires_grad_(),
        old_logprobs=rows(P),
        generation_logprobs=rows(G),
        reference_logprobs=rows(Q),
        advantages=rows(A),
        token_mask=torch.tensor([[False, True, True, True], [True] * 4]),
        sample_mask=torch.tensor([True, False]),
        entropy=rows([0.1, 0.2, 0.6]),
    )
    return grpo_loss(config, inputs, Normalizer(num_tokens=6, num_sequences=2))


def mean(values):
    return sum(values) / len(values)


def test_metrics_are_masked_means_over_valid_tokens():
    output = one_row_of_three_and_a_masked_row(LossConfig(use_importance_sampling_correction=True))
    weights = [p - g for p, g in zip(P, G, strict=True)]
    ratios = [math.exp(c - p) for c, p in zip(C, P, strict=True)]
    assert output.sums.means() == pytest.approx(
        {
            "loss": output.loss.item(),
            "actor_loss": output.loss.item(),
            "gen_kl_error": mean([math.exp(w) - 1 - w for w in weights]),
            "token_mult_prob_error": mean([math.exp(abs(w)) for w in weights]),
            "sampling_importance_ratio": mean([math.exp(w) for w in weights]),
            "probs_ratio": mean(ratios),
            "approx_entropy": mean([-p for p in P]),
            "clip_fraction": 1 / 3,  # only e^0.5 with A = 1 is beyond 1.2
            "kl": mean([math.exp(q - c) - 1 - (q - c) for q, c in zip(Q, C, strict=True)]),
            "entropy": 0.3,
            "num_valid_tokens": 3,
            "num_valid_sequences": 1,
        }
    )


def test_weights_are_reported_as_measured_even_when_truncated_or_unused():
    truncated = LossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.01,
    )
    reported = [
        one_row_of_three_and_a_masked_row(config).sums.means()["sampling_importance_ratio"]
        for config in (LossConfig(), truncated)
    ]
    assert reported == pytest.approx([mean([math.exp(p - g) for p, g in zip(P, G, strict=True)])] * 2)


def test_shares_are_per_update_and_token_metrics_per_token():
    sums = one_row_of_three_and_a_masked_row(LossConfig()).sums
    twice = (sums + sums).means(num_updates=2)
    assert {name: twice[name] for name in ("loss", "entropy")} == pytest.approx(
        {name: sums.means()[name] for name in ("loss", "entropy")}
    )
    assert twice["num_valid_tokens"] == 6


def test_sums_of_different_metrics_do_not_mix():
    sums = one_row_of_three_and_a_masked_row(LossConfig()).sums
    other = type(sums)(shares=sums.shares, token_metrics=sums.token_metrics[::-1], values=sums.values)
    with pytest.raises(AssertionError, match="different metrics"):
        _ = sums + other
