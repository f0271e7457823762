"""YAML text -> plain values with line numbers, closing the traps that plain YAML 1.1 leaves open.

Numbers are numbers (`1e-6` is a float), times are text (`4:00:00` is not 14400), `010` is not octal, dates are text.
Refused, each with its line: duplicate keys, tabs, keys that are no text, bare `on/off/yes/no`, and bare values that
other YAML readers would turn into base-60 numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_OTHER_BOOL = re.compile(r"^(?:on|off|yes|no)$", re.IGNORECASE)
_BASE_60 = re.compile(r"^[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+$|^[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*$")
_STANDARD_TAG = re.compile(r"^tag:yaml\.org,2002:\w+$")
_LOOKS_NUMERIC = re.compile(r"^[-+]?\.?\d[\d_.:xa-fA-F+-]*$")

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One file's mapping; `lines` tells where each key stands; `problems` are (line, text). Not `readable`: the text
    is no YAML mapping at all."""

    values: dict[str, Any]
    lines: dict[Path, int]
    problems: tuple[tuple[int, str], ...]
    readable: bool = True


@dataclass(kw_only=True, slots=True)
class _Reading:
    base_60_is_text: bool
    lines: dict[Path, int] = field(default_factory=dict)
    enclosing: list[yaml.Node] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)


def read_document(text: str) -> Document:
    """Values, lines and problems of a whole recipe file. Never raises on bad YAML: that is a problem too."""
    reading = _Reading(base_60_is_text=False)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return Document(values={}, lines={}, problems=(_syntax_problem(error),), readable=False)
    if node is None:
        return Document(values={}, lines={}, problems=())
    if not isinstance(node, yaml.MappingNode):
        problem = (_line(node), "a recipe is a mapping of keys to values")
        return Document(values={}, lines={}, problems=(problem,), readable=False)
    values = _value(node, (), reading)
    return Document(values=values, lines=reading.lines, problems=tuple(reading.problems))


def read_value(text: str) -> Any:
    """The value of a command-line override. Raises ValueError with what is wrong. The shell has eaten the quotes, so
    a bare `00:04:00:00` is text here."""
    reading = _Reading(base_60_is_text=True)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(_syntax_problem(error)[1]) from None
    value = None if node is None else _value(node, (), reading)
    if reading.problems:
        raise ValueError("; ".join(problem for _, problem in reading.problems))
    return value


def to_yaml(values: dict[str, Any]) -> str:
    """Values as a recipe file that reads back to the same values, keys in their given order."""
    return yaml.dump(values, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that looks like a number or a time: readers differ on which of it is text."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "'" if _LOOKS_NUMERIC.match(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_RecipeDumper.add_representer(str, _RecipeDumper.represent_str)


def _syntax_problem(error: yaml.YAMLError) -> tuple[int, str]:
    if not isinstance(error, yaml.MarkedYAMLError):
        return 1, f"not readable as YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    if "\\t" in (error.problem or ""):
        return line, "a tab where YAML wants spaces"
    return line, f"YAML syntax: {error.problem or error.context}"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _value(node: yaml.Node, path: Path, reading: _Reading) -> Any:
    if not _STANDARD_TAG.match(node.tag):
        reading.problems.append((_line(node), f"{'.'.join(path)}: the YAML tag {node.tag} is not read"))
        return None
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, reading)
    if any(node is outer for outer in reading.enclosing):
        reading.problems.append((_line(node), f"{'.'.join(path)}: an alias of what contains it"))
        return None
    reading.enclosing.append(node)
    try:
        if isinstance(node, yaml.MappingNode):
            return _mapping(node, path, reading)
        return [_value(item, (*path, str(index)), reading) for index, item in enumerate(node.value)]
    finally:
        reading.enclosing.pop()


def _mapping(node: yaml.MappingNode, path: Path, reading: _Reading) -> dict[str, Any]:
    values: dict[str, Any] = {}
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line, key = _line(key_node), key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or not isinstance(_plain(key_node, reading), str):
            reading.problems.append((line, f"{'.'.join(path) or 'top level'}: a key must be text, got {key!r}"))
            continue
        here = (*path, key)
        if key == "<<":
            reading.problems.append((line, f"{'.'.join(here)}: YAML merge keys are not read; use `defaults:`"))
        elif key in seen:
            reading.problems.append((line, f"{'.'.join(here)}: duplicate key (first on line {seen[key]})"))
        else:
            seen[key] = line
            reading.lines[here] = line
            values[key] = _value(value_node, here, reading)
    return values


def _scalar(node: yaml.ScalarNode, path: Path, reading: _Reading) -> Any:
    text, where = node.value, f"{'.'.join(path)}: " if path else ""
    plain = node.style is None
    if plain and _OTHER_BOOL.match(text):
        reading.problems.append((_line(node), f"{where}bare {text!r}: write true or false, or quote it as text"))
    elif plain and _BASE_60.match(text) and not reading.base_60_is_text:
        reading.problems.append((_line(node), f"{where}bare {text} is a base-60 number to YAML: quote it"))
    return _plain(node, reading)


def _plain(node: yaml.ScalarNode, reading: _Reading) -> Any:
    text = node.value
    if node.style is not None:
        return text
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""), 0)
    if _FLOAT.match(text):
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())
    return text
