"""Rules on vLLM: what breaks each, what it names, what passes; and what is said where it cannot run."""

import pytest

from megatron_grpo.config import installed, rule_vllm
from megatron_grpo.config.installed import vllm_fault
from tests.unit.config.recipes import SYNC, VLLM, assert_names, found, only, recipe

CFG = "policy.generation.vllm_cfg"


def test_vllm_is_never_colocated():
    shared = {**VLLM, "policy.generation.colocated.enabled": True}
    for mode in ({}, SYNC):
        problem = only(found(rule_vllm.vllm_has_its_own_gpus, shared, mode))
        assert_names(problem, "policy.generation.colocated.enabled", "vllm")
    assert found(rule_vllm.vllm_has_its_own_gpus, VLLM) == []
    assert found(rule_vllm.vllm_has_its_own_gpus, {"policy.generation.colocated.enabled": True}) == []


def test_async_vllm_needs_its_async_engine():
    rule, off = rule_vllm.vllm_async_needs_its_async_engine, {f"{CFG}.async_engine": False}
    assert_names(only(found(rule, VLLM, off)), f"{CFG}.async_engine", "grpo.async_grpo.enabled")
    in_flight = {"grpo.async_grpo.in_flight_weight_updates": True}
    assert_names(only(found(rule, VLLM, off, in_flight)), "in_flight_weight_updates")
    assert found(rule, VLLM) == [] and found(rule, VLLM, off, SYNC) == []


def test_experts_spread_over_the_ranks_of_a_replica():
    rule = rule_vllm.vllm_experts_follow_its_tensor_parallelism
    two = {f"{CFG}.expert_parallel_size": 2}
    assert_names(only(found(rule, VLLM, two)), f"{CFG}.expert_parallel_size = 2", f"{CFG}.tensor_parallel_size = 1")
    assert found(rule, VLLM, two, {f"{CFG}.tensor_parallel_size": 2}) == [] and found(rule, two) == []


def test_a_replica_stays_on_one_node():
    rule, nodes = rule_vllm.vllm_replicas_stay_on_a_node, {"cluster.num_nodes": 3, f"{CFG}.tensor_parallel_size": 4}
    several = {**VLLM, **nodes, "policy.generation.colocated.resources.num_nodes": 2}
    assert_names(only(found(rule, several)), f"{CFG}.tensor_parallel_size", "4", "2 GPUs", "gpus_per_node")
    assert found(rule, several, {f"{CFG}.tensor_parallel_size": 2}) == []
    assert found(rule, VLLM) == []


def test_a_head_that_vllm_cannot_run_on_a_cpu_is_named():
    assert_names(rule_vllm.head_size_fault(recipe(VLLM, {"policy.model_config.head_dim": 16})), "head_dim = 16", "32, 64")
    assert rule_vllm.head_size_fault(recipe(VLLM)) is None


@pytest.mark.parametrize(
    ("version", "said"), [(None, "not installed"), ("0.31.2", "vLLM 0.31.2 is installed"), ("0.33.0", "0.33.0")]
)
def test_a_missing_or_foreign_vllm_is_answered_with_what_to_install(monkeypatch, version, said):
    monkeypatch.setattr(installed, "_vllm_version", lambda: version)
    assert_names(vllm_fault(), said, "pip install 'megatron_grpo[vllm]'", "make setup-vllm", "make train-vllm")


def test_the_release_that_the_pins_name_is_accepted(monkeypatch):
    monkeypatch.setattr(installed, "_vllm_version", lambda: "0.32.0")
    assert vllm_fault() is None
