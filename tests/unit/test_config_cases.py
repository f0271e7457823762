"""Runs the table of known recipe faults (tests/cases/config_faults.json, or the folder in MEGATRON_GRPO_CASES).

A row patches base_async.yaml or brings its own files, and says whether the recipe is refused and what the output names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config.load import LoadedRecipe, load_recipe
from megatron_grpo.errors import ConfigError

CASES = Path(os.environ.get("MEGATRON_GRPO_CASES") or Path(__file__).parents[1] / "cases")
ROWS = json.loads((CASES / "config_faults.json").read_text())

RESOLVED = {  # what the table's prose says about accepted rows
    "G4-06d": {"grpo.max_num_steps": 9},
    "G4-07": {"data.max_input_seq_length": 320},
    "G4-08": {"policy.megatron_cfg.optimizer.lr": 1e-6},
    "G4-16c": {"grpo.max_num_steps": 5, "grpo.seed": 42},
}
SAID = {  # what the table's prose says about messages
    "G4-05": ["max_trajectory_age_steps"],
    "G4-05b": ["grpo.async_grpo.max_trajectory_age_steps"],
    "G4-06": ["policy.sequence_packing.train_mb_token"],
    "G4-13": ["line 6"],
    "G4-16": ["recipe.yaml"],
    "G4-17": ["15", "2 x 2 = 4"],
    "G4-19": ["valid sizes"],
    "G4-20": ["6 training GPUs"],
    "G4-20b": ["0 GPUs left for training"],
}


def alternatives(row: dict[str, Any]) -> list[dict[str, Any]]:
    return row.get("patch_each") or [row.get("patch", {})]


VARIANTS = [
    pytest.param(row, patch, id=f"{row['id']}-{number}")
    for row in ROWS
    for number, patch in enumerate(alternatives(row))
]


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[last] = value


def write_recipe(row: dict[str, Any], patch: dict[str, Any], folder: Path) -> Path:
    base = yaml.safe_load((CASES / "base_async.yaml").read_text())
    for key, value in patch.items():
        set_dotted(base, key, value)
    if "model" in row:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(row["model"]))
        base["policy"]["model_name"] = str(model)
    (folder / "base_async.yaml").write_text(yaml.safe_dump(base))
    for name, text in row.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if "raw_text" in row:
        (folder / "recipe.yaml").write_text(row["raw_text"])
    return folder / row.get("entry", "recipe.yaml" if "raw_text" in row else "base_async.yaml")


def value_of(loaded: LoadedRecipe, key: str) -> Any:
    value: Any = loaded.resolved
    for part in key.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize(("row", "patch"), VARIANTS)
def test_known_recipe_fault(row, patch, tmp_path, monkeypatch):
    recipe = write_recipe(row, patch, tmp_path)
    monkeypatch.chdir(row.get("cwd", tmp_path))
    if row["expect"] == "ok":
        loaded = load_recipe(recipe, row.get("cli", []))
        for key, value in RESOLVED.get(row["id"], {}).items():
            assert value_of(loaded, key) == value
        return
    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe, row.get("cli", []))
    for name in [*row["names"], *SAID.get(row["id"], [])]:
        assert name in str(refused.value), str(refused.value)
    assert all("\n" not in problem for problem in refused.value.problems)
