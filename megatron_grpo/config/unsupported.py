"""Keys of the field's public recipes that are accepted so that such a recipe loads, though nothing here reads them.

The table is `unsupported.yaml`. Keys of a generation backend that is not chosen are inert and not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .sources import KeyPath, value_at
from .yaml_source import read_document

BACKEND_SECTIONS = {
    "policy.generation.vllm_cfg": "vllm",
    "policy.generation.vllm_kwargs": "vllm",
    "policy.generation.mcore_generation_config": "megatron",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    switched: dict[str, str]
    fixed: dict[str, list[Any]]
    unused: dict[str, str]  # key -> why nothing depends on it


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """`values` without the keys that the schema does not read; problems are (key, text)."""

    values: dict[str, Any]
    problems: tuple[tuple[KeyPath, str], ...]


@cache
def table() -> Table:
    text = files(__package__).joinpath("unsupported.yaml").read_text(encoding="utf-8")
    values = read_document(text).values
    unused = {key: why for why, keys in values["unused"].items() for key in keys}
    return Table(switched=values["switched"], fixed=values["fixed"], unused=unused)


def unsupported_keys() -> tuple[str, ...]:
    content = table()
    switches = [f"{section}.{switch}" for section, switch in content.switched.items()]
    return (*content.switched, *switches, *content.fixed, *content.unused)


def backend_of(values: dict[str, Any]) -> Any:
    """The generation backend of plain values, which may still be wrong."""
    return value_at(values, ("policy", "generation", "backend")) or "megatron"


def foreign_backend(key: str, backend: Any) -> str | None:
    """The backend whose section `key` lies in, when another one generates."""
    for section, owner in BACKEND_SECTIONS.items():
        if (key == section or key.startswith(f"{section}.")) and owner != backend:
            return owner
    return None


def remove_unsupported(values: dict[str, Any]) -> Removed:
    """Take the table's keys out of resolved values, judging each. `values` is left alone."""
    backend = backend_of(values)
    kept, taken = _split(values, ())
    problems = [
        (path, problem)
        for path, value in taken
        for problem in _judge(".".join(path), value)
        if not foreign_backend(".".join(path), backend)
    ]
    return Removed(values=kept, problems=tuple(problems))


def _split(values: dict[str, Any], prefix: KeyPath) -> tuple[dict[str, Any], list[tuple[KeyPath, Any]]]:
    content = table()
    kept: dict[str, Any] = {}
    taken: list[tuple[KeyPath, Any]] = []
    for name, value in values.items():
        path = (*prefix, name)
        key = ".".join(path)
        if key in content.switched or key in content.fixed or key in content.unused:
            taken.append((path, value))
        elif isinstance(value, dict):
            kept[name], below = _split(value, path)
            taken.extend(below)
            if below and not kept[name]:  # a section that the schema may not even have
                del kept[name]
        else:
            kept[name] = value
    return kept, taken


def _judge(key: str, value: Any) -> Iterator[str]:
    content = table()
    if key in content.switched:
        switch = content.switched[key]
        on = value_at(value, (switch,))
        if on is not None and on is not False:
            yield f"{switch}: {on!r} is not supported; only {switch}: false is"
    elif key in content.fixed and not any(_same(value, neutral) for neutral in content.fixed[key]):
        neutral = " or ".join(_yaml(item) for item in content.fixed[key])
        yield f"{_yaml(value)} is not supported; leave it out or at {neutral}"


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and `true` is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _yaml(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_constant(value) else repr(value)


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool)
