"""Keys of the field's public recipes that nothing here reads."""

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config.load import load_recipe
from megatron_grpo.config.names import known_keys, schema_keys
from megatron_grpo.config.unsupported import foreign_backend, remove_unsupported, table

CASES = Path(os.environ.get("MEGATRON_GRPO_CASES") or Path(__file__).parents[2] / "cases")
TSV = CASES / "recipe_keys.tsv"
TSV = TSV if TSV.exists() else Path(__file__).parents[2] / "cases" / "recipe_keys.tsv"


def parse(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return yaml.safe_load(text)
    return {"{}": {}, "None": None}.get(value, value) if isinstance(value, str) else value


def public_keys() -> list[list[str]]:
    return [line.split("\t") for line in TSV.read_text().splitlines() if line and not line.startswith("#")]


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in dotted.items():
        *parents, last = key.split(".")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return result


@pytest.mark.parametrize("key", [row[0] for row in public_keys()])
def test_every_public_key_is_read_or_in_the_table(key):
    prefixes = {key[: at if at > 0 else None] for at in [*(i for i, c in enumerate(key) if c == "."), -1]}
    content = table()
    in_table = prefixes & {*content.switched, *content.fixed, *content.unused}
    free_option = key.startswith("env.")
    assert key in schema_keys() or in_table or free_option


def test_no_key_is_both_read_and_in_the_table():
    content = table()
    assert not schema_keys() & {*content.switched, *content.fixed, *content.unused}
    assert len(known_keys()) == len(set(known_keys()))


def test_the_public_named_recipe_loads_unchanged(tmp_path):
    path = tmp_path / "named.yaml"
    path.write_text(yaml.safe_dump(nested({row[0]: parse(row[1]) for row in public_keys()})))
    recipe = load_recipe(path).recipe
    assert recipe.grpo.async_grpo.max_trajectory_age_steps == 4
    assert recipe.policy.megatron_cfg.expert_model_parallel_size == 8
    assert recipe.policy.generation.colocated.enabled


def problems_of(key: str, value: Any, **extra: Any) -> list[str]:
    removed = remove_unsupported(nested({key: value, **extra}))
    return [f"{'.'.join(path)}: {text}" for path, text in removed.problems]


NEUTRAL = [(key, value) for key, values in table().fixed.items() for value in values]
VLLM = {"policy.generation.backend": "vllm"}


def backend_of(key: str) -> dict[str, str]:
    return VLLM if foreign_backend(key, "megatron") else {}


@pytest.mark.parametrize(("key", "value"), NEUTRAL)
def test_a_neutral_value_is_accepted_and_taken_out(key, value):
    removed = remove_unsupported(nested({key: value, "grpo.seed": 1, **backend_of(key)}))
    assert removed.problems == () and removed.values["grpo"] == {"seed": 1}
    assert key.split(".")[-1] not in str(removed.values)


@pytest.mark.parametrize("key", list(table().fixed))
def test_another_value_is_not_supported(key):
    [problem] = problems_of(key, "something else", **backend_of(key))
    assert problem.startswith(key) and "not supported" in problem


@pytest.mark.parametrize(("section", "switch"), table().switched.items())
def test_a_section_switched_off_may_hold_anything_and_switched_on_nothing(section, switch):
    assert problems_of(f"{section}.{switch}", False, **{f"{section}.other": [1]}) == []
    assert problems_of(f"{section}.other", 1) == []
    [problem] = problems_of(f"{section}.{switch}", True)
    assert f"{section}: {switch}: True is not supported" in problem


@pytest.mark.parametrize("key", list(table().unused))
def test_an_unused_key_may_have_any_value(key):
    removed = remove_unsupported(nested({f"{key}": {"deep": [1]}}))
    assert removed.problems == () and removed.values == {}


def test_true_is_not_one_and_false_is_not_zero():
    assert problems_of("grpo.batch_multiplier", True)
    assert problems_of("policy.megatron_cfg.mtp_num_layers", False)
    assert not problems_of("loss_fn.positive_example_nll_weight", 0.0)


def test_the_section_of_another_backend_is_inert():
    key = "policy.generation.vllm_cfg.kv_cache_dtype"
    assert problems_of(key, "fp8") == []
    assert problems_of(key, "fp8", **VLLM) != []
    parsers = "policy.generation.mcore_generation_config.parsers"
    assert problems_of(parsers, ["x"]) != []
    assert problems_of(parsers, ["x"], **VLLM) == []


def test_an_unknown_key_beside_a_table_key_stays_to_be_refused():
    removed = remove_unsupported(nested({"reward_penalties.token_ids": None, "reward_penalties.tpyo": 1}))
    assert removed.values == {"reward_penalties": {"tpyo": 1}}
