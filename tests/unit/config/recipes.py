"""A small valid recipe for the tests of this folder, and ways to change it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron_grpo.config.facts import Facts, ModelShape
from megatron_grpo.config.schema import Recipe

ARCHITECTURE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
VALUES: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "async_grpo": {"enabled": True}},
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {"model_name": "scratch", "model_config": ARCHITECTURE},
    "data": {"train": {"env": "sort_digits", "num_rows": 64}},
}
SHAPE = ModelShape(num_attention_heads=4, num_key_value_heads=2, num_layers=2, num_experts=None)
FACTS = Facts(model=SHAPE, train_rows=64, unreadable=())

DISJOINT = {
    "cluster.gpus_per_node": 4,
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 2,
}
VLLM = {**DISJOINT, "policy.generation.backend": "vllm", "policy.generation.vllm_cfg.async_engine": True}
SYNC = {"grpo.async_grpo.enabled": False}


def changed(*changes: dict[str, Any]) -> dict[str, Any]:
    """The plain values with dotted keys set."""
    result = copy.deepcopy(VALUES)
    for change in changes:
        for key, value in change.items():
            *parents, last = key.split(".")
            section = result
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
    return result


def recipe(*changes: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(changed(*changes))


def found(rule, *changes, facts=FACTS):
    return list(rule(recipe(*changes), facts))


def shape(**changes):
    return dataclasses.replace(FACTS, model=dataclasses.replace(SHAPE, **changes))


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


def assert_names(problem, *names):
    for name in names:
        assert str(name) in problem, problem
