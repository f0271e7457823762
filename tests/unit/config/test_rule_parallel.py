"""Rules on the parallel layout: what breaks each, what it names, what passes."""

import dataclasses

from megatron_grpo.config import rule_parallel
from tests.unit.config.recipes import DISJOINT, FACTS, assert_names, found, only, shape

MEGATRON = "policy.megatron_cfg"
MCORE = "policy.generation.mcore_generation_config"
TP, PP, CP = (
    f"{MEGATRON}.tensor_model_parallel_size",
    f"{MEGATRON}.pipeline_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
)
EP, ETP, SP = (
    f"{MEGATRON}.expert_model_parallel_size",
    f"{MEGATRON}.expert_tensor_parallel_size",
    f"{MEGATRON}.sequence_parallel",
)
RESOURCES = "policy.generation.colocated.resources"


def test_one_node_leaves_gpus_for_training():
    rule = rule_parallel.one_node_leaves_gpus_for_training
    for gpus in (4, 5):
        problem = only(found(rule, DISJOINT, {f"{RESOURCES}.gpus_per_node": gpus}))
        assert_names(problem, f"{RESOURCES}.gpus_per_node", "cluster.gpus_per_node = 4", "0 GPUs left for training")
    assert_names(only(found(rule, DISJOINT, {f"{RESOURCES}.gpus_per_node": None})), f"{RESOURCES}.gpus_per_node")
    assert_names(only(found(rule, DISJOINT, {f"{RESOURCES}.num_nodes": 2})), f"{RESOURCES}.num_nodes")
    assert found(rule, DISJOINT, {f"{RESOURCES}.num_nodes": 1}) == [] and found(rule) == []


def test_several_nodes_leave_nodes_for_training():
    rule = rule_parallel.several_nodes_leave_nodes_for_training
    nodes = {"cluster.num_nodes": 2, f"{RESOURCES}.num_nodes": 1}
    assert_names(
        only(found(rule, DISJOINT, nodes, {f"{RESOURCES}.num_nodes": 2})), f"{RESOURCES}.num_nodes", "0 GPUs left"
    )
    assert_names(only(found(rule, DISJOINT, nodes, {f"{RESOURCES}.num_nodes": None})), f"{RESOURCES}.num_nodes")
    assert_names(only(found(rule, DISJOINT, nodes, {f"{RESOURCES}.gpus_per_node": 5})), f"{RESOURCES}.gpus_per_node")
    assert found(rule, DISJOINT, nodes) == []
    assert found(rule, DISJOINT, nodes, {f"{RESOURCES}.gpus_per_node": None}) == []


def test_model_parallel_sizes_divide_the_training_gpus():
    rule, gpus = rule_parallel.model_parallel_divides_training_gpus, {**DISJOINT, "cluster.gpus_per_node": 8}
    problem = only(found(rule, gpus, {TP: 2, PP: 2}))
    assert_names(problem, TP, PP, CP, "2 x 2 x 1 = 4", "6 training GPUs", "8 in the cluster - 2 set apart")
    assert found(rule, gpus, {TP: 2, CP: 3}) == []


def test_expert_sizes_divide_the_training_gpus():
    rule = rule_parallel.expert_parallel_divides_training_gpus
    assert_names(only(found(rule, {"cluster.gpus_per_node": 4, EP: 3})), EP, ETP, "3 x 1 x 1 = 3", "4 training GPUs")
    assert found(rule, {"cluster.gpus_per_node": 4, EP: 2, ETP: 2}) == []


def test_generation_sizes_divide_the_generation_gpus():
    rule = rule_parallel.generation_parallel_divides_its_gpus
    odd = {**DISJOINT, f"{RESOURCES}.gpus_per_node": 3}
    assert_names(only(found(rule, odd, {TP: 2})), TP, "3 GPUs that generate")
    assert_names(
        only(found(rule, odd, {f"{MCORE}.tensor_model_parallel_size": 2})), f"{MCORE}.tensor_model_parallel_size"
    )
    vllm = {"policy.generation.backend": "vllm", "policy.generation.vllm_cfg.tensor_parallel_size": 2}
    assert_names(only(found(rule, odd, vllm)), "policy.generation.vllm_cfg.tensor_parallel_size")
    assert found(rule, DISJOINT, {TP: 2}) == []


def test_a_colocated_engines_own_size_divides_the_gpus_that_train():
    rule, six = rule_parallel.generation_parallel_divides_its_gpus, {"cluster.gpus_per_node": 6}
    own = f"{MCORE}.tensor_model_parallel_size"
    assert_names(only(found(rule, six, {own: 4})), f"{own} = 4", "6 GPUs that generate (colocated")
    assert found(rule, six, {own: 2}) == []
    assert found(rule, six, {TP: 4}) == [], "the policy's own rule says it"


def test_tensor_parallel_divides_attention_heads_and_lists_valid_sizes():
    problem = only(found(rule_parallel.tensor_parallel_divides_heads, {TP: 8}, facts=shape(num_attention_heads=28)))
    assert_names(problem, f"{TP} = 8", "28 attention heads", "1, 2, 4, 7, 14, 28")
    assert found(rule_parallel.tensor_parallel_divides_heads, {TP: 7}, facts=shape(num_attention_heads=28)) == []


def test_tensor_parallel_divides_kv_heads_without_replication():
    rule = rule_parallel.tensor_parallel_divides_kv_heads
    assert_names(only(found(rule, {TP: 4})), TP, "2 key/value heads", "replicating")
    assert_names(
        only(found(rule, {TP: 2}, facts=shape(num_key_value_heads=3))), TP, "3 key/value heads", "valid sizes: 1, 3"
    )
    assert found(rule, {TP: 2}) == []


def test_the_generators_own_tensor_parallel_size_is_held_against_heads_too():
    changes = {f"{MCORE}.tensor_model_parallel_size": 3}
    assert_names(
        only(found(rule_parallel.tensor_parallel_divides_heads, changes)), f"{MCORE}.tensor_model_parallel_size = 3"
    )


def test_rotary_heads_are_even():
    assert "head_dim = 31" in only(found(rule_parallel.rotary_heads_are_even, {"policy.model_config.head_dim": 31}))


def test_inline_heads_form_groups():
    problem = only(found(rule_parallel.inline_heads_form_groups, {"policy.model_config.num_key_value_heads": 3}))
    assert_names(problem, "policy.model_config.num_attention_heads = 4", "policy.model_config.num_key_value_heads = 3")


def test_expert_parallel_divides_experts():
    rule = rule_parallel.expert_parallel_divides_experts
    assert_names(only(found(rule, {EP: 2})), EP, "no experts")
    assert_names(only(found(rule, {EP: 3}, facts=shape(num_experts=8))), f"{EP} = 3", "8 experts")
    assert found(rule, {EP: 4}, facts=shape(num_experts=8)) == [] and found(rule) == []


def test_sequence_parallel_needs_tensor_parallel():
    assert_names(only(found(rule_parallel.sequence_parallel_needs_tensor_parallel, {SP: True})), SP, TP)
    assert found(rule_parallel.sequence_parallel_needs_tensor_parallel, {SP: True, TP: 2}) == []


def test_experts_beside_tensor_parallel_need_sequence_parallel():
    rule = rule_parallel.experts_under_tensor_parallel_need_sequence_parallel
    assert_names(only(found(rule, {EP: 2, TP: 2})), EP, TP, SP)
    assert found(rule, {EP: 2, TP: 2, SP: True}) == [] and found(rule, {EP: 2}) == []


def test_segments_tile_the_cluster():
    rule = rule_parallel.segments_tile_the_cluster
    assert_names(
        only(found(rule, {"cluster.segment_size": 3, "cluster.num_nodes": 4})),
        "cluster.segment_size",
        "cluster.num_nodes",
    )
    assert found(rule, {"cluster.segment_size": 2, "cluster.num_nodes": 4}) == []


def test_without_a_readable_model_its_rules_are_skipped():
    blind = dataclasses.replace(FACTS, model=None)
    for rule in (
        rule_parallel.tensor_parallel_divides_heads,
        rule_parallel.tensor_parallel_divides_kv_heads,
        rule_parallel.expert_parallel_divides_experts,
    ):
        assert found(rule, {TP: 8, PP: 3, EP: 5}, facts=blind) == []
