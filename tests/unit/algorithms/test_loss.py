"""The objective against a token-by-token loop, and what must not change it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.loss import LossConfig, Normalizer, grpo_loss
from megatron_grpo.batching.pack import pack_rows
from tests.unit.algorithms.loss_batches import (
    TOKEN_ARRAYS,
    batches,
    configs,
    inputs_of,
    normalizer_of,
    random_batch,
    take,
)
from tests.unit.algorithms.slow_loss import slow_loss

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def loss_and_gradient(config, batch, normalizer, dtype=torch.float64):
    inputs = inputs_of(batch, dtype)
    output = grpo_loss(config, inputs, normalizer)
    output.loss.backward()
    return output, inputs.current_logprobs.grad


@settings(max_examples=120, deadline=None)
@given(config=configs, batch=batches)
def test_equals_the_loop_over_tokens(config, batch):
    normalizer = normalizer_of(batch)
    as_lists = {name: array.tolist() for name, array in batch.items()}
    loss, actor, kl, gradient = slow_loss(config, as_lists, normalizer.num_tokens or 1, normalizer.num_sequences or 1)
    output, found = loss_and_gradient(config, batch, normalizer)
    np.testing.assert_allclose([output.loss.item(), output.actor_loss, output.kl], [loss, actor, kl], **TIGHT)
    np.testing.assert_allclose(found, gradient, **TIGHT)


@settings(max_examples=40, deadline=None, derandomize=True)  # one example in a million sits on a clip or mask bound
@given(config=configs, batch=batches)
def test_float32_is_close_to_float64(config, batch):
    normalizer = normalizer_of(batch)
    batch = {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in batch.items()}
    exact, exact_gradient = loss_and_gradient(config, batch, normalizer)
    output, gradient = loss_and_gradient(config, batch, normalizer, torch.float32)
    np.testing.assert_allclose(output.loss.item(), exact.loss.item(), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-4, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(config=configs, batch=batches, size=st.integers(1, 3), seed=st.integers(0, 99))
def test_micro_batches_of_any_size_in_any_order_add_up(config, batch, size, seed):
    normalizer = normalizer_of(batch)
    whole, gradient = loss_and_gradient(config, batch, normalizer)
    order = np.random.default_rng(seed).permutation(4)
    total, sums, parts = 0.0, None, torch.zeros_like(gradient)
    for start in range(0, 4, size):
        rows = order[start : start + size]
        output, parts[rows] = loss_and_gradient(config, take(batch, rows), normalizer)
        total += output.loss.item()
        sums = output.sums if sums is None else sums + output.sums
    np.testing.assert_allclose(total, whole.loss.item(), **TIGHT)
    np.testing.assert_allclose(parts, gradient, **TIGHT)
    assert sums.means() == pytest.approx(whole.sums.means(), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(config=configs, batch=batches, extra=st.integers(1, 20), junk=st.sampled_from((np.nan, -np.inf, 200.0, -1e4)))
def test_padding_and_junk_at_masked_positions_change_nothing(config, batch, extra, junk):
    normalizer = normalizer_of(batch)
    clean, gradient = loss_and_gradient(config, batch, normalizer)
    padded = {name: np.pad(array, ((0, 0), (0, extra))) if array.ndim == 2 else array for name, array in batch.items()}
    for name in TOKEN_ARRAYS:
        padded[name] = np.where(padded["valid"], padded[name], junk)
    dirty, found = loss_and_gradient(config, padded, normalizer)
    np.testing.assert_allclose(dirty.loss.item(), clean.loss.item(), **TIGHT)
    np.testing.assert_allclose(found[:, :-extra], gradient, **TIGHT)
    assert (found[~torch.tensor(padded["valid"])] == 0).all()
    assert dirty.sums.means() == pytest.approx(clean.sums.means(), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(config=configs, batch=batches, capacity=st.sampled_from((6, 7, 13, 24)))
def test_packed_rows_equal_padded_rows(config, batch, capacity):
    normalizer = normalizer_of(batch)
    padded, gradient = loss_and_gradient(config, batch, normalizer)
    lengths = np.maximum((batch["token_mask"] * np.arange(1, 7)).max(1), 1)
    plan = pack_rows(lengths, capacity)
    packed = {name: plan.pack(batch[name], np.nan) for name in TOKEN_ARRAYS}
    for name in ("token_mask", "sample_mask", "valid"):
        packed[name] = plan.pack(batch[name], False)
    packed["segment_ids"] = plan.segment_ids
    output, found = loss_and_gradient(config, packed, normalizer)
    np.testing.assert_allclose(output.loss.item(), padded.loss.item(), **TIGHT)
    np.testing.assert_allclose(plan.unpack(found.numpy(), width=6, fill=0.0), gradient, **TIGHT)
    assert output.sums.means() == pytest.approx(padded.sums.means(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(use_cispo=True), LossConfig(token_level_loss=False)])
def test_nothing_valid_gives_zero_with_the_graph_kept(config):
    batch = random_batch(3)
    batch["sample_mask"][:] = False
    batch["valid"][:] = False
    output, gradient = loss_and_gradient(config, batch, Normalizer(num_tokens=0, num_sequences=0))
    assert output.loss.item() == 0 and output.loss.requires_grad and (gradient == 0).all()
    means = output.sums.means()
    assert means["num_valid_tokens"] == 0 and all(np.isfinite(list(means.values())))


def test_a_ratio_beyond_the_float_range_on_the_clipped_side_costs_no_nan():
    batch = random_batch(0)
    batch["sample_mask"][:] = True
    batch["valid"], batch["adv"] = batch["token_mask"], np.ones_like(batch["adv"])
    row, column = np.argwhere(batch["valid"])[0]
    batch["curr"][row, column] = 5000.0
    output, gradient = loss_and_gradient(LossConfig(), batch, normalizer_of(batch))
    assert output.loss.isfinite() and gradient.isfinite().all() and gradient[row, column] == 0


def test_old_and_generation_logprobs_get_no_gradient():
    inputs = inputs_of(random_batch(1))
    inputs.old_logprobs.requires_grad_()
    inputs.generation_logprobs.requires_grad_()
    config = LossConfig(use_importance_sampling_correction=True, use_cispo=True)
    grpo_loss(config, inputs, Normalizer(num_tokens=9, num_sequences=4)).loss.backward()
    assert inputs.generation_logprobs.grad is None
    assert inputs.old_logprobs.grad is None or (inputs.old_logprobs.grad == 0).all()


def test_what_the_configuration_needs_must_be_given():
    batch = random_batch(0)
    full = inputs_of(batch)
    lacking = type(full)(
        current_logprobs=full.current_logprobs,
        old_logprobs=full.old_logprobs,
        generation_logprobs=full.generation_logprobs,
        advantages=full.advantages,
        token_mask=full.token_mask,
        sample_mask=full.sample_mask,
    )
    for config, named in (
        (LossConfig(reference_policy_kl_penalty=0.1), "reference_logprobs"),
        (LossConfig(entropy_coef=0.1), "entropy"),
    ):
        with pytest.raises(ValueError, match=named):
            grpo_loss(config, lacking, normalizer_of(batch))
    output = grpo_loss(LossConfig(), lacking, normalizer_of(batch))
    assert output.kl == 0 and "kl" not in output.sums.means() and "entropy" not in output.sums.means()
