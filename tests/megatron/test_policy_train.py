"""Training: updates, schedule, warm start, reference, and what stops a run before the optimizer."""

import dataclasses

import numpy as np
import pytest

from megatron_grpo.errors import ConfigError, RunFailed
from megatron_grpo.types import ScoredBatch
from tests.megatron.samples import (
    build_policy,
    own_rollouts,
    own_rows,
    random_rollouts,
    random_solutions,
    random_update,
    tiny_recipe,
    without_samples,
)
from tests.megatron.world import run_world


def weights_of(policy) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in policy.module.named_parameters()}


def train_twice(seat, recipe, updates):
    policy = build_policy(seat, recipe)
    storages = [parameter.data_ptr() for parameter in policy.module.parameters()]
    own = [own_rows(seat, update) for update in updates]
    first, second = policy.train(own), policy.train(own)
    assert storages == [parameter.data_ptr() for parameter in policy.module.parameters()]
    assert not any(parameter.requires_grad is False for parameter in policy.module.parameters())
    return first, second, weights_of(policy), policy.reports


def test_several_updates_train_in_place_and_all_ranks_report_the_same():
    updates = [random_update(random_rollouts(seed=seed), seed) for seed in (1, 2, 3)]
    ((first, second, weights, reports),) = run_world(train_twice, tiny_recipe(), updates)
    assert first.num_updates == 3 and reports
    assert second.metrics["loss"] < first.metrics["loss"]
    for name in ("gen_kl_error", "probs_ratio", "approx_entropy", "grad_norm", "sampling_importance_ratio"):
        assert np.isfinite(first.metrics[name]), name
    assert first.metrics["num_valid_tokens"] == sum(update.num_valid_tokens for update in updates)

    both = run_world(train_twice, tiny_recipe(), updates, size=2)
    for result, _, replica, _ in both:
        assert result.metrics == pytest.approx(first.metrics, rel=1e-4, abs=1e-6)
        for name, value in replica.items():
            np.testing.assert_array_equal(value, both[0][2][name])
            np.testing.assert_allclose(value, weights[name], atol=1e-4)


def reporting_ranks(seat, recipe):
    return build_policy(seat, recipe).reports


def test_one_rank_of_each_data_parallel_shard_reports():
    assert run_world(reporting_ranks, tiny_recipe(), size=4, tp=2) == [True, False, True, False]


def rates_of(seat, recipe, num_updates):
    policy = build_policy(seat, recipe)
    update = random_update(random_rollouts())
    return [policy.train([update, update]).learning_rate for _ in range(num_updates // 2)]


def test_the_schedule_counts_updates():
    """Each step holds two updates; its reported rate is that of its second one: positions 1, 3, 5, ..."""
    warm_up = {"lr_warmup_iters": 4, "lr_warmup_init": 0.0}
    (rates,) = run_world(rates_of, tiny_recipe(scheduler=warm_up), 6)
    assert rates == pytest.approx([1e-3 * 1 / 4, 1e-3 * 3 / 4, 1e-3])

    linear = {"lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 0}
    (rates,) = run_world(rates_of, tiny_recipe(scheduler=linear, optimizer={"lr": 1e-3, "min_lr": 0.0}), 6)
    assert rates == pytest.approx([1e-3 * 0.9, 1e-3 * 0.7, 1e-3 * 0.5])

    cosine = linear | {"lr_decay_style": "cosine"}
    (rates,) = run_world(rates_of, tiny_recipe(scheduler=cosine, optimizer={"lr": 1e-3, "min_lr": 0.0}), 6)
    assert rates == pytest.approx([1e-3 * 0.5 * (1 + np.cos(np.pi * at / 10)) for at in (1, 3, 5)])


def refusal(seat, recipe):
    with pytest.raises(ConfigError) as caught:
        build_policy(seat, recipe)
    return str(caught.value)


def test_a_warm_up_longer_than_the_decay_is_refused():
    (message,) = run_world(refusal, tiny_recipe(scheduler={"lr_decay_style": "cosine", "lr_warmup_iters": 1000}))
    assert "lr_warmup_iters 1000" in message and "lr_decay_iters 1000" in message


def failing_updates(seat, recipe, updates):
    policy = build_policy(seat, recipe)
    before = weights_of(policy)
    with pytest.raises(RunFailed) as caught:
        policy.train([own_rows(seat, update) for update in updates])
    untouched = all(np.array_equal(value, before[name]) for name, value in weights_of(policy).items())
    return str(caught.value), untouched


def test_an_update_without_valid_tokens_stops_before_the_optimizer():
    empty = without_samples(random_update(random_rollouts()))
    for message, untouched in run_world(failing_updates, tiny_recipe(), [empty], size=2):
        assert "update 1 of 1 has no valid token" in message and untouched


def test_a_gradient_norm_that_is_not_finite_is_named_and_not_applied():
    update = random_update(random_rollouts())
    broken = dataclasses.replace(update, advantages=np.where(np.arange(16) == 3, np.inf, 1.0).astype(np.float32))
    for message, untouched in run_world(failing_updates, tiny_recipe(), [broken], size=2):
        assert "gradient norm is" in message and untouched


def partly_masked(seat, recipe, update):
    policy = build_policy(seat, recipe)
    return policy.train([own_rows(seat, update)]).metrics


def test_micro_batches_without_valid_tokens_add_nothing():
    update = random_update(random_rollouts())
    rollouts = update.scored.rollouts
    masked = dataclasses.replace(rollouts, sample_mask=np.arange(16) == 0)
    valid = int((masked.loss_mask & masked.sample_mask[:, None]).sum())
    update = dataclasses.replace(
        update,
        scored=dataclasses.replace(update.scored, rollouts=masked),
        num_valid_tokens=valid,
        num_valid_sequences=1,
    )
    for metrics in run_world(partly_masked, tiny_recipe(train_micro_batch_size=2), update, size=2):
        assert metrics["num_valid_tokens"] == valid and all(np.isfinite(value) for value in metrics.values())


def warm_start(seat, recipe, batch):
    policy = build_policy(seat, recipe)
    losses = policy.warm_start([batch] * 25, lr=5e-3)
    policy.finish_warm_start()
    moments = [state for state in policy.optimizer.adam.chained_optimizers[0].optimizer.state.values() if state]
    return losses, policy.optimizer.learning_rate, len(moments)


def test_the_loss_falls_in_the_warm_start_and_reinforcement_learning_starts_afresh():
    schedule = {"lr_warmup_iters": 10, "lr_warmup_init": 1e-5}
    ((losses, rate, num_moments),) = run_world(warm_start, tiny_recipe(scheduler=schedule), random_solutions())
    assert losses[0] == pytest.approx(np.log(47), rel=0.05) and losses[-1] < 0.5 * losses[0]
    assert rate == pytest.approx(1e-5) and num_moments == 0

    for others, _, _ in run_world(warm_start, tiny_recipe(scheduler=schedule), random_solutions(), size=2):
        assert others == pytest.approx(losses, rel=1e-3)


def with_reference(seat, recipe, rollouts, update):
    policy = build_policy(seat, recipe)
    start = policy.score(own_rollouts(seat, rollouts))
    weights = weights_of(policy)
    again = policy.score(own_rollouts(seat, rollouts))
    unchanged = all(np.array_equal(value, weights[name]) for name, value in weights_of(policy).items())
    policy.train([own_rows(seat, update)] * 3)
    trained: ScoredBatch = policy.score(own_rollouts(seat, rollouts))
    policy.finish_warm_start()
    return start, again, trained, policy.score(own_rollouts(seat, rollouts)), unchanged


def test_the_reference_stays_where_reinforcement_learning_began():
    rollouts = random_rollouts()
    update = random_update(rollouts, with_reference=True)
    recipe = tiny_recipe(loss_fn={"reference_policy_kl_penalty": 0.1})
    ((start, again, trained, rebased, unchanged),) = run_world(with_reference, recipe, rollouts, update)
    np.testing.assert_array_equal(start.reference_logprobs, start.old_logprobs)
    np.testing.assert_array_equal(again.old_logprobs, start.old_logprobs)
    assert unchanged
    np.testing.assert_array_equal(trained.reference_logprobs, start.old_logprobs)
    assert np.abs(trained.old_logprobs - start.old_logprobs).max() > 1e-2
    np.testing.assert_array_equal(rebased.reference_logprobs, trained.old_logprobs)


def test_without_a_kl_weight_there_is_no_reference():
    (scored,) = run_world(score_once, tiny_recipe(), random_rollouts())
    assert scored.reference_logprobs is None


def score_once(seat, recipe, rollouts):
    return build_policy(seat, recipe).score(rollouts)


def train_while_generating(seat, recipe, update):
    policy = build_policy(seat, recipe)
    policy.enter_generation()
    with pytest.raises(AssertionError, match="engine must sleep"):
        policy.train([update])
    assert not policy.module.training
    policy.enter_training()
    return policy.train([update]).num_updates


def test_training_is_refused_while_the_engine_owns_the_module():
    assert run_world(train_while_generating, tiny_recipe(), random_update(random_rollouts())) == [1]


def test_bfloat16_trains_with_float32_moments():
    recipe = tiny_recipe(precision="bfloat16")
    ((losses, _, _),) = run_world(warm_start, recipe, random_solutions())
    assert losses[-1] < 0.6 * losses[0]
