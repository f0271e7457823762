"""Rules on backend, placement, KV cache and importance weights: what breaks each, what it names, what passes."""

import pytest

from megatron_grpo.config import rule_modes
from tests.unit.config.recipes import SYNC, VLLM, assert_names, found, only

MCORE = "policy.generation.mcore_generation_config"
MEGATRON = "policy.megatron_cfg"
RECOMPUTE, MODE = "grpo.async_grpo.recompute_kv_cache_after_weight_updates", f"{MCORE}.kv_cache_management_mode"


def test_only_megatron_trains():
    assert_names(only(found(rule_modes.megatron_trains, {f"{MEGATRON}.enabled": False})), f"{MEGATRON}.enabled")


def test_an_unknown_backend_is_answered_with_the_installed_ones_and_the_way_to_add_one():
    problem = only(found(rule_modes.backend_is_installed, {"policy.generation.backend": "sglang"}))
    assert_names(problem, "policy.generation.backend", "sglang", "megatron", "vllm", "megatron_grpo.generation")


def test_a_registered_backend_is_accepted(monkeypatch):
    class Found:
        name = "sglang"

    monkeypatch.setattr(
        rule_modes, "entry_points", lambda group: [Found] if group == "megatron_grpo.generation" else []
    )
    assert found(rule_modes.backend_is_installed, {"policy.generation.backend": "sglang"}) == []


@pytest.mark.parametrize("backend", [{}, VLLM])
def test_filters_that_the_trainer_does_not_know_are_refused_in_training_only(backend):
    rule = rule_modes.training_samples_are_not_filtered
    assert_names(only(found(rule, backend, {"policy.generation.top_k": 20})), "policy.generation.top_k = 20", "null")
    assert_names(only(found(rule, backend, {"policy.generation.top_p": 0.9})), "policy.generation.top_p = 0.9", "1.0")
    free = {"policy.generation.temperature": 0.7, "policy.generation.val_top_k": 5, "policy.generation.val_top_p": 0.5}
    assert found(rule, backend, free) == []


@pytest.mark.parametrize("mode", ["persist", "offload", None])
def test_recompute_with_a_mode_that_keeps_the_cache_is_refused(mode):
    problem = only(found(rule_modes.kv_cache_mode_agrees_with_recompute, {RECOMPUTE: True, MODE: mode}))
    assert_names(
        problem, f"{RECOMPUTE}: true", f"{MODE}: {mode or 'persist'}", f"{MODE}=recompute", f"{RECOMPUTE}=false"
    )


def test_a_mode_that_frees_the_cache_without_recompute_is_refused():
    problem = only(found(rule_modes.kv_cache_mode_agrees_with_recompute, {MODE: "recompute"}))
    assert_names(problem, f"{RECOMPUTE}: false", f"{MODE}: recompute", f"{RECOMPUTE}=true", f"{MODE}=persist")


@pytest.mark.parametrize(
    "changes",
    [
        {RECOMPUTE: True, MODE: "recompute"},
        {MODE: "offload"},
        {MODE: "persist"},
        {MODE: None},
        {**SYNC, MODE: "recompute"},
    ]
    + [{**VLLM, RECOMPUTE: True, MODE: mode} for mode in ("persist", "nonsense")]
    + [{**VLLM, MODE: "recompute"}],
)
def test_agreeing_modes_sync_runs_and_vllm_are_left_alone(changes):
    assert found(rule_modes.kv_cache_mode_agrees_with_recompute, changes) == []
    assert found(rule_modes.kv_cache_mode_is_known, changes) == []


def test_an_unknown_mode_lists_the_three():
    problem = only(found(rule_modes.kv_cache_mode_is_known, {MODE: "keep"}))
    assert_names(problem, MODE, "keep", "persist", "offload", "recompute")
    assert found(rule_modes.kv_cache_mode_agrees_with_recompute, {MODE: "keep", RECOMPUTE: True}) == []


def test_async_must_correct_importance():
    off = {"loss_fn.use_importance_sampling_correction": False}
    assert_names(
        only(found(rule_modes.async_corrects_importance, off)),
        "loss_fn.use_importance_sampling_correction",
        "grpo.async_grpo.enabled",
    )
    assert found(rule_modes.async_corrects_importance, off, SYNC) == []


def test_a_model_from_scratch_is_described():
    assert_names(
        only(found(rule_modes.scratch_model_is_described, {"policy.model_config": None})),
        "policy.model_config",
        "policy.model_name",
    )
    assert found(rule_modes.scratch_model_is_described, {"policy.model_config": None, "policy.model_name": "a/b"}) == []


def test_transformer_engine_needs_cuda():
    te = {f"{MEGATRON}.layer_spec": "te"}
    assert_names(
        only(found(rule_modes.transformer_engine_needs_cuda, te, {"cluster.accelerator": "cpu"})),
        f"{MEGATRON}.layer_spec",
        "cluster.accelerator",
    )
    assert found(rule_modes.transformer_engine_needs_cuda, te) == []
