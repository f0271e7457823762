"""Defaults that depend on another key, filled into the plain values before they are typed.

A reader of a recipe therefore never meets "unset". Values of a wrong type are left for the schema to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUILT_IN_ENVIRONMENTS = ("math", "reasoning_gym", "sort_digits")
SCRATCH = "scratch"
TASK_TOKENIZER = "task"

Values = dict[str, Any]


def fill(values: Values) -> Values:
    """A copy with every dependent default in place."""
    filled = dict(values)
    for section, fill_section in (("policy", _policy), ("data", _data), ("env", _env)):
        if isinstance(filled.get(section, {}), Mapping):
            filled[section] = fill_section(filled)
    return filled


def _section(values: Any, *path: str) -> Values:
    """The mapping at `path`; empty where there is none."""
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return dict(values) if isinstance(values, Mapping) else {}


def _with_default(section: Values, key: str, value: Any) -> Values:
    return section if section.get(key) is not None else {**section, key: value}


def _policy(values: Values) -> Values:
    """One update per step, log-probs in training micro-batches, the model's own tokenizer, only Megatron shares GPUs."""
    policy = _section(values, "policy")
    rows = _trajectories_per_step(_section(values, "grpo"))
    if rows is not None:
        policy = _with_default(policy, "train_global_batch_size", rows)
    policy = _with_default(policy, "logprob_batch_size", policy.get("train_micro_batch_size", 1))
    if isinstance(policy.get("tokenizer", {}), Mapping):
        model = policy.get("model_name", SCRATCH)
        own = TASK_TOKENIZER if model == SCRATCH else model
        policy["tokenizer"] = _with_default(_section(policy, "tokenizer"), "name", own)
    generation = _section(policy, "generation")
    if isinstance(policy.get("generation", {}), Mapping) and isinstance(generation.get("colocated", {}), Mapping):
        shares = generation.get("backend", "megatron") == "megatron"
        colocated = _with_default(_section(generation, "colocated"), "enabled", shares)
        policy["generation"] = {**generation, "colocated": colocated}
    return policy


def _trajectories_per_step(grpo: Values) -> int | None:
    prompts, generations = grpo.get("num_prompts_per_step", 32), grpo.get("num_generations_per_prompt", 16)
    if type(prompts) is not int or type(generations) is not int or prompts < 1 or generations < 1:
        return None
    return prompts * generations


def _data(values: Values) -> Values:
    """A source without `env` takes `data.default.env_name`; without that, stored rows are `math`."""
    data = _section(values, "data")
    default = _section(data, "default").get("env_name")
    for name in ("train", "validation"):
        source = data.get(name)
        if isinstance(source, Mapping):
            stored = source.get("path") is not None or source.get("dataset_name") is not None
            environment = default if default is not None else "math" if stored else None
            data[name] = _with_default(dict(source), "env", environment)
    return data


def _env(values: Values) -> Values:
    """A built-in environment that the data uses needs no block of its own."""
    env, data = _section(values, "env"), _data(values)
    for name in ("train", "validation"):
        used = _section(data, name).get("env")
        if used in BUILT_IN_ENVIRONMENTS:
            env.setdefault(used, {})
    return env
