"""The list of rules as a whole."""

import re

from megatron_grpo.config import rule_batch, rule_loss, rule_modes, rule_parallel, rule_pipeline, rule_vllm
from megatron_grpo.config.rules import RULES, broken_rules, cautions
from tests.unit.config.recipes import DISJOINT, FACTS, VLLM, only, recipe

RESOURCES = "policy.generation.colocated.resources"


def test_the_recipe_the_tests_start_from_breaks_no_rule():
    assert broken_rules(recipe(), FACTS) == []
    assert broken_rules(recipe(VLLM), FACTS) == []


def test_every_rule_is_listed_once():
    defined = [
        member
        for module in (rule_modes, rule_vllm, rule_loss, rule_batch, rule_parallel, rule_pipeline)
        for name, member in vars(module).items()
        if getattr(member, "__module__", None) == module.__name__
        and "facts" in str(member.__annotations__).lower()
        and not name.startswith("_")
    ]
    assert sorted(rule.__name__ for rule in defined) == sorted(rule.__name__ for rule in RULES)


def test_idle_gpus_and_lonely_trajectories_are_cautioned():
    idle = {**DISJOINT, "cluster.num_nodes": 2, f"{RESOURCES}.num_nodes": 1}
    assert re.search(r"resources\.gpus_per_node: 2 GPUs .* idle", only(list(cautions(recipe(idle)))))
    assert "num_generations_per_prompt" in only(list(cautions(recipe({"grpo.num_generations_per_prompt": 1}))))
    assert list(cautions(recipe())) == []
