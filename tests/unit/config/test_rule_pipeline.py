"""Rules on pipelines: what breaks each, what it names, what passes."""

import dataclasses

from megatron_grpo.config import rule_pipeline
from tests.unit.config.recipes import DISJOINT, FACTS, assert_names, found, only, shape

MEGATRON = "policy.megatron_cfg"
MCORE = "policy.generation.mcore_generation_config"
PP, VPP = f"{MEGATRON}.pipeline_model_parallel_size", f"{MEGATRON}.virtual_pipeline_model_parallel_size"
FIRST, LAST = f"{MEGATRON}.num_layers_in_first_pipeline_stage", f"{MEGATRON}.num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = f"{MEGATRON}.account_for_embedding_in_pipeline_split", f"{MEGATRON}.account_for_loss_in_pipeline_split"


def test_layers_fill_the_stages_unless_their_ends_are_given():
    rule, seven = rule_pipeline.layers_fill_the_stages, shape(num_layers=7)
    assert_names(only(found(rule, DISJOINT, {PP: 2}, facts=seven)), f"{PP} = 2", "7 layers", FIRST, EMBEDDING)
    for fits in ({FIRST: 3}, {FIRST: 3, LAST: 4}, {EMBEDDING: True}, {LOSS: True}):
        assert found(rule, {PP: 2}, fits, facts=seven) == []
    assert found(rule, {PP: 4, FIRST: 2, LAST: 1}, facts=seven) == [] and found(rule, {PP: 7}, facts=seven) == []
    for bad in ({FIRST: 3, LAST: 3}, {FIRST: 7}, {EMBEDDING: True, LOSS: True}):
        assert len(found(rule, {PP: 2}, bad, facts=seven)) == 1
    assert found(rule, {PP: 4, FIRST: 1, LAST: 1}, facts=seven) != []
    assert found(rule, {PP: 3}, facts=dataclasses.replace(FACTS, model=None)) == []


def test_layers_fill_the_chunks_of_an_interleaved_pipeline():
    rule, six = rule_pipeline.layers_fill_the_stages, shape(num_layers=6)
    assert_names(only(found(rule, DISJOINT, {PP: 2, VPP: 2}, facts=six)), f"{PP} x {VPP} = 2 x 2", "6 layers")
    assert found(rule, DISJOINT, {PP: 2, VPP: 3}, facts=six) == []


def test_an_engine_with_stages_of_its_own_is_held_against_the_layers():
    rule = rule_pipeline.layers_fill_the_stages
    assert_names(only(found(rule, {f"{MCORE}.pipeline_model_parallel_size": 3})), f"{MCORE}.pipeline_model_parallel_size = 3")
    assert found(rule, {f"{MCORE}.pipeline_model_parallel_size": 2}) == []


def test_virtual_stages_need_stages():
    assert_names(only(found(rule_pipeline.virtual_stages_need_stages, {VPP: 2})), f"{VPP} = 2", f"{PP} > 1")
    assert found(rule_pipeline.virtual_stages_need_stages, {VPP: 2, PP: 2}) == []


def test_the_ends_of_a_pipeline_are_given_in_one_way():
    assert_names(only(found(rule_pipeline.ends_are_given_in_one_way, {FIRST: 1, LOSS: True})), FIRST, EMBEDDING)
    assert found(rule_pipeline.ends_are_given_in_one_way, {FIRST: 1, LAST: 1}) == []
