"""A recipe and its parents as layers, lowest first; command-line overrides are the last layer.

`defaults:` names a parent or a list of parents, relative to the file that asks. Depth first, later wins, child wins.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .yaml_source import read_document, read_value

SUFFIXES = (".yaml", ".yml")
COMMAND_LINE = "command line"
KeyPath = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One source of values. `itself` marks what the user wrote for this run: the named recipe and the overrides."""

    name: str
    values: dict[str, Any]
    lines: dict[KeyPath, int]
    itself: bool

    def line(self, key: KeyPath) -> int | None:
        """The key's line, or that of the nearest enclosing key that has one; None on the command line."""
        found = (self.lines.get(key[:length]) for length in range(len(key), 0, -1))
        return next((line for line in found if line is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """`complete` is false where a whole file is missing: what follows from absent keys is then not worth telling."""

    layers: tuple[Layer, ...]
    problems: tuple[str, ...]
    complete: bool

    def last_set(self) -> dict[KeyPath, int]:
        """Leaf key -> index of the last layer that sets it."""
        return {key: index for index, layer in enumerate(self.layers) for key in leaves(layer.values)}

    def places(self, keys: Iterable[KeyPath]) -> str:
        """Where the keys are set last, as the end of a message: ` (toy.yaml, lines 3, 8)`; empty where nowhere."""
        by_layer: dict[str, list[int]] = {}
        for key in keys:
            layer = next((layer for layer in reversed(self.layers) if _has(layer.values, key)), None)
            if layer is not None:
                line = layer.line(key)
                by_layer.setdefault(layer.name, []).extend([] if line is None else [line])
        described = [f"{name}{_lines(lines)}" for name, lines in by_layer.items()]
        return f" ({'; '.join(described)})" if described else ""


def _lines(numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    if not ordered:
        return ""
    return f", line{'s' if len(ordered) > 1 else ''} {', '.join(str(number) for number in ordered)}"


def read_sources(path: str | os.PathLike[str], overrides: Sequence[str]) -> Sources:
    """All layers of one recipe. Every unreadable file, syntax problem and bad override becomes a problem."""
    layers: list[Layer] = []
    problems: list[str] = []
    complete = _read_file(Path(path), (), layers, problems)
    layers.append(_command_line(overrides, problems))
    return Sources(layers=tuple(layers), problems=tuple(problems), complete=complete)


def merge(layers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Mappings merge key by key; everything else, lists included, is replaced by the later layer."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge_two(merged, layer)
    return merged


def leaves(values: dict[str, Any], prefix: KeyPath = ()) -> list[KeyPath]:
    found: list[KeyPath] = []
    for key, value in values.items():
        here = (*prefix, key)
        found.extend(leaves(value, here) if isinstance(value, dict) and value else [here])
    return found


def value_at(values: Any, key: KeyPath) -> Any:
    """The value of a dotted key; None where it is absent."""
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _merge_two(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge_two(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _has(values: Any, key: KeyPath) -> bool:
    for part in key:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _read_file(path: Path, chain: tuple[Path, ...], layers: list[Layer], problems: list[str]) -> bool:
    """Append the file's parents and then the file; false when any of them could not be read."""
    asked_by = f" (asked for by `defaults:` in {chain[-1]})" if chain else ""
    if path.resolve() in (parent.resolve() for parent in chain):
        circle = " -> ".join(str(parent) for parent in (*chain, path))
        problems.append(f"`defaults:` go round in a circle: {circle}")
        return False
    try:
        document = read_document(_read_text(path))
    except ValueError as error:
        problems.append(f"{error}{asked_by}")
        return False
    problems.extend(f"{path}, line {line}: {problem}" for line, problem in document.problems)
    values = dict(document.values)
    parents = _parents(values.pop("defaults", None), path, problems)
    complete = [_read_file(path.parent / parent, (*chain, path), layers, problems) for parent in parents]
    layers.append(Layer(name=str(path), values=values, lines=document.lines, itself=not chain))
    return document.readable and all(complete)


def _parents(defaults: Any, path: Path, problems: list[str]) -> list[str]:
    parents = [defaults] if isinstance(defaults, str) else (defaults or [])
    if isinstance(parents, list) and all(isinstance(parent, str) and parent for parent in parents):
        return parents
    problems.append(f"{path}: defaults must be a path or a list of paths, got {defaults!r}")
    return []


def _read_text(path: Path) -> str:
    """The file's text. Raises ValueError naming the absolute path, what is wrong, and near names."""
    absolute = path.absolute()
    if absolute.is_dir():
        raise ValueError(f"recipe {absolute} is a directory; name one of its files{_near_names(absolute / 'x.yaml')}")
    if not absolute.exists():
        raise ValueError(f"recipe not found: {absolute}{_near_names(absolute)}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"recipe {absolute} does not end in .yaml or .yml{_near_names(absolute)}")
    try:
        return absolute.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {absolute} cannot be read: {error}") from None


def _near_names(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in SUFFIXES)
    except OSError:
        return f"; the directory {path.parent} cannot be read either"
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6) or names[:3]
    return f"; near: {', '.join(near)}" if near else ""


def _command_line(overrides: Sequence[str], problems: list[str]) -> Layer:
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.lstrip("+").split(".")
        if not equals or not all(parts):
            problems.append(f"{COMMAND_LINE}: {override!r} is no override; write key.path=value")
            continue
        try:
            value: Any = read_value(text)
        except ValueError as error:
            problems.append(f"{COMMAND_LINE}: {'.'.join(parts)}: {error}")
            continue
        for part in reversed(parts):
            value = {part: value}
        values = _merge_two(values, value)
    return Layer(name=COMMAND_LINE, values=values, lines={}, itself=True)
