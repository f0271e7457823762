"""The names a recipe may use, and the nearest valid one for a name it may not."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import BaseModel

from .schema import Recipe
from .unsupported import unsupported_keys


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field, also when it may be null; None for plain values."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _walk(section: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        inner = section_of(field.annotation)
        if inner is not None and typing.get_origin(field.annotation) is not dict:
            yield from _walk(inner, f"{key}.")


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key and section that the schema reads, then those accepted at a neutral value only."""
    return (*_walk(Recipe, ""), *unsupported_keys())


@cache
def schema_keys() -> frozenset[str]:
    return frozenset(_walk(Recipe, ""))


def nearest(key: str) -> str:
    """Advice for an unknown dotted key, as the end of a sentence; empty where nothing is close."""
    parent, _, leaf = key.rpartition(".")
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == leaf]
    if elsewhere:
        closest = sorted(elsewhere, key=lambda known: -_shared_parts(known, key))
        return f"; it lives at {' or '.join(closest[:3])}"
    siblings = [known for known in known_keys() if known.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6) or _near_leaf(leaf)
    return f"; did you mean {near[0]}?" if near else ""


def _near_leaf(leaf: str) -> list[str]:
    by_leaf: dict[str, str] = {}
    for known in known_keys():
        by_leaf.setdefault(known.rpartition(".")[2], known)
    return [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)]


def _shared_parts(left: str, right: str) -> int:
    return len(set(left.split(".")) & set(right.split(".")))


def schema_defaults(section: type[BaseModel] = Recipe) -> dict[str, Any]:
    """Every plain default as a nested mapping: what `${a.b}` finds where no file sets `a.b`."""
    defaults: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            value = schema_defaults(type(value))
        if not field.is_required():
            defaults[field.alias or name] = list(value) if isinstance(value, tuple) else value
    return defaults
