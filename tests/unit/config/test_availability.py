"""Valid recipes that this version cannot run yet."""

import pytest

from megatron_grpo.config.availability import FEATURES, not_available_yet
from tests.unit.config.recipes import DISJOINT, SYNC, VLLM, recipe

MEGATRON = "policy.megatron_cfg"
MCORE = "policy.generation.mcore_generation_config"

ASKED = [
    {"policy.generation.stop_strings": ["END"]},
    {f"{MEGATRON}.virtual_pipeline_model_parallel_size": 2},
    {f"{MEGATRON}.context_parallel_size": 2},
    {f"{MEGATRON}.expert_model_parallel_size": 2},
    {"policy.sequence_packing.enabled": True},
    {"policy.model_name": "nobody/nothing"},
    {"data.train": {"dataset_name": "rows"}},
    {"data.train.streaming": True},
    {"grpo.max_rollout_turns": 2},
]


@pytest.mark.parametrize("changes", ASKED, ids=lambda changes: next(iter(changes)))
def test_a_feature_of_a_later_version_is_named(changes):
    [note] = not_available_yet(recipe(changes))
    assert "not available yet" in note
    assert any(key.split(".")[-1] in note for key in changes)


def test_every_feature_is_covered():
    assert len(ASKED) == len(FEATURES)


def test_what_this_version_can_do_is_not_named():
    assert not_available_yet(recipe()) == [] and not_available_yet(recipe(DISJOINT)) == []
    assert not_available_yet(recipe(SYNC, {"grpo.async_grpo.in_flight_weight_updates": True})) == []
    assert not_available_yet(recipe({"grpo.async_grpo.in_flight_weight_updates": True})) == []
    assert not_available_yet(recipe({f"{MCORE}.kv_cache_management_mode": "offload"})) == []
    assert not_available_yet(recipe({f"{MCORE}.enable_prefix_caching": True})) == []


def test_vllm_may_be_cut_differently_from_the_policy():
    assert not_available_yet(recipe(VLLM, {"policy.generation.vllm_cfg.tensor_parallel_size": 2})) == []
