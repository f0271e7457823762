"""What the recipe's model and data files say, as far as they can be read here.

Rules that need a shape or a row count are skipped where it is None; the reader gets a warning instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dependent import SCRATCH
from .schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """None: the model's configuration does not say."""

    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_layers: int | None = None
    num_experts: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    model: ModelShape | None
    train_rows: int | None
    unreadable: tuple[str, ...]


def gather(recipe: Recipe) -> Facts:
    """Never raises on a bad file: it is named in `unreadable`."""
    unreadable: list[str] = []
    try:
        model = _model_shape(recipe)
    except (OSError, ValueError) as error:
        model = None
        unreadable.append(
            f"policy.model_name: {recipe.policy.model_name} cannot be read here ({error}); rules that need the "
            "model's shape are skipped"
        )
    try:
        rows = _train_rows(recipe)
    except (OSError, ValueError, ImportError) as error:
        rows = None
        unreadable.append(f"data.train: cannot be read here ({error}); rules that need the number of rows are skipped")
    return Facts(model=model, train_rows=rows, unreadable=(*unreadable, *_missing_files(recipe)))


def _missing_files(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    named = {
        "data.validation.path": data.validation.path if data.validation else None,
        "data.default.prompt_file": data.default.prompt_file,
    }
    for key, path in named.items():
        if path is not None and not Path(path).is_file():
            yield f"{key}: no file {Path(path).absolute()}"


def _model_shape(recipe: Recipe) -> ModelShape | None:
    if recipe.policy.model_name != SCRATCH:
        return _shape_of_directory(Path(recipe.policy.model_name))
    inline = recipe.policy.architecture
    if inline is None:
        return None
    return ModelShape(
        num_attention_heads=inline.num_attention_heads,
        num_key_value_heads=inline.num_key_value_heads,
        num_layers=inline.num_hidden_layers,
    )


def _shape_of_directory(directory: Path) -> ModelShape:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"no {path}")
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")  # noqa: TRY004 - bad data, not a bad argument
    heads = _first_int(values, "num_attention_heads", "n_head")
    return ModelShape(
        num_attention_heads=heads,
        num_key_value_heads=_first_int(values, "num_key_value_heads") or heads,
        num_layers=_first_int(values, "num_hidden_layers", "n_layer"),
        num_experts=_first_int(values, "n_routed_experts", "num_experts", "num_local_experts"),
    )


def _first_int(values: dict[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if type(values.get(name)) is int), None)


def _train_rows(recipe: Recipe) -> int | None:
    train = recipe.data.train
    if train is None or train.path is None:
        return train.num_rows if train else None
    path = Path(train.path)
    if not path.is_file():
        raise ValueError(f"no file {path.absolute()}")
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _parquet_rows(path: Path) -> int:
    import pyarrow.parquet  # only this format needs it, and it is slow to import

    return pyarrow.parquet.read_metadata(path).num_rows
