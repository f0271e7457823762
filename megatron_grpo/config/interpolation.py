"""`${a.b}`, `${oc.env:VAR}` and small arithmetic, resolved by OmegaConf.

Two results: the values a run uses, and the values that may be shown or saved, in which everything that came from the
environment is still written as its `${oc.env:...}` expression.
"""

from __future__ import annotations

import copy
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .sources import merge

_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(,?)")
_TO_BE_GIVEN = "???"  # OmegaConf's mark of a value that an overriding recipe must set
Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """`problems` are (key, text); their keys are left out of the values."""

    values: dict[str, Any]
    shown: dict[str, Any]
    secrets: dict[str, str]  # resolved text -> the expression it came from
    problems: tuple[tuple[tuple[str, ...], str], ...]


def resolve(given: dict[str, Any], defaults: dict[str, Any]) -> Resolved:
    """Resolve what the layers give; `defaults` only serve as targets of `${...}`."""
    given = copy.deepcopy(given)
    problems = [*_unparseable(given)]
    _drop(given, problems)
    whole = copy.deepcopy(merge([defaults, given]))
    unresolvable = list(_unresolvable(whole, given))
    problems.extend(unresolvable)
    _drop(whole, unresolvable)
    _drop(given, unresolvable)
    values = _replaced(whole, given)
    shown = _replaced(_mask_environment(whole), given)
    return Resolved(values=values, shown=shown, secrets=_secrets(values, shown), problems=tuple(problems))


def _replaced(whole: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` with its expressions replaced by what they find in `whole`."""
    if not _texts(given):
        return given
    return _pick(OmegaConf.to_container(OmegaConf.create(whole), resolve=True), given)


def _register_arithmetic() -> None:
    """The operators that the field's public recipes use, e.g. `${mul:${a.b}, 4}`."""
    for name, compute in _OPERATORS.items():
        OmegaConf.register_resolver(name, _on_numbers(compute), replace=True)


def _div(left: float, right: float) -> float:
    """An integer where it divides: sizes stay integers."""
    return left // right if left % right == 0 else left / right


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul,
    "div": _div,
    "add": operator.add,
    "sub": operator.sub,
    "max": max,
    "min": min,
}


def _on_numbers(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Only numbers: "4" times 3 is not "444"."""

    def apply(left: Any, right: Any) -> Any:
        for value in (left, right):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{value!r} is not a number")
        return compute(left, right)

    return apply


def _texts(value: Any, path: Path = ()) -> list[tuple[Path, str]]:
    """Every text that OmegaConf does not take as it stands, with its path."""
    if isinstance(value, str):
        return [(path, value)] if "${" in value or value == _TO_BE_GIVEN else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in _texts(item, (*path, key))]


def _key(path: Path) -> tuple[str, ...]:
    """The key a path belongs to: list positions are not keys."""
    keys = []
    for part in path:
        if isinstance(part, int):
            break
        keys.append(part)
    return tuple(keys)


def _unparseable(given: dict[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    problems = []
    for path, text in _texts(given):
        if text == _TO_BE_GIVEN:
            problems.append((_key(path), "must be given: its value is still ???"))
            continue
        try:
            OmegaConf.create({"text": text})
        except OmegaConfBaseException as error:
            problems.append((_key(path), f"{text!r} is no interpolation: {_first_line(error)}"))
    return problems


def _unresolvable(whole: dict[str, Any], given: dict[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    _register_arithmetic()
    config = OmegaConf.create(whole if _texts(given) else {})
    problems = []
    for path, text in _texts(given):
        try:
            node: Any = config
            for part in path:
                node = node[part]
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as error:
            problems.append((_key(path), _why_unresolvable(text, error)))
    return problems


def _why_unresolvable(text: str, error: Exception) -> str:
    missing = [name for name, default in _ENV.findall(text) if not default and name not in os.environ]
    if missing:
        return f"environment variable {', '.join(missing)} is not set (used by {text})"
    return f"{text} cannot be resolved: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _drop(values: dict[str, Any], problems: list[tuple[tuple[str, ...], str]]) -> None:
    """Leave out the keys that cannot be resolved, in place."""
    for key, _ in problems:
        node: Any = values
        for part in key[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(key[-1], None)


def _pick(resolved: Any, like: Any) -> Any:
    """The part of `resolved` that `like` has keys for."""
    if not isinstance(like, dict) or not isinstance(resolved, dict):
        return resolved
    return {key: _pick(resolved[key], value) for key, value in like.items()}


def _mask_environment(value: Any) -> Any:
    """Escape what reads the environment, so that resolving leaves the expression itself."""
    if isinstance(value, dict):
        return {key: _mask_environment(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask_environment(item) for item in value]
    if isinstance(value, str) and _ENV.search(value):
        return value.replace("${", "\\${")
    return value


def _secrets(values: Any, shown: Any) -> dict[str, str]:
    if isinstance(values, dict) and isinstance(shown, dict):
        return {text: raw for key in values for text, raw in _secrets(values[key], shown.get(key)).items()}
    if isinstance(values, list) and isinstance(shown, list) and len(values) == len(shown):
        return {text: raw for pair in zip(values, shown, strict=True) for text, raw in _secrets(*pair).items()}
    return {str(values): str(shown)} if values != shown else {}
