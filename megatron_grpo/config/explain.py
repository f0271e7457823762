"""Schema findings as sentences a recipe's author can act on."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from .names import nearest
from .sources import KeyPath

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}
MUST_BE_GIVEN = "must be given"
_LONGEST = 80  # characters of a value in a message
_PATTERNS = {"checkpoint_must_save_by": "a duration 'DD:HH:MM:SS' in quotes", "target": "'package.module:Class'"}


def explain(error: ValidationError) -> list[tuple[KeyPath, str]]:
    """One (key, text) per finding."""
    return [(tuple(str(part) for part in found["loc"]), _sentence(found)) for found in error.errors(include_url=False)]


def _sentence(found: dict[str, Any]) -> str:
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key{nearest('.'.join(str(part) for part in found['loc']))}"
    if kind == "missing":
        return MUST_BE_GIVEN
    if kind == "literal_error":
        return f"{_shown(value)} is none of {context['expected'].replace(' or ', ', ')}{_hint(value)}"
    if kind == "string_pattern_mismatch":
        expected = _PATTERNS.get(str(found["loc"][-1]), f"text like {context['pattern']}")
        return f"expected {expected}, got {_shown(value)}"
    if kind in _BOUNDS:
        sign, limit = _BOUNDS[kind]
        return f"must be {sign} {context[limit]}, got {_shown(value)}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {_shown(value)} ({_kind_of(value)}){_hint(value)}"
    return f"{found['msg']}, got {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _kind_of(value: Any) -> str:
    names = {bool: "true/false", int: "an integer", float: "a number", str: "text", dict: "a mapping"}
    return names.get(type(value), "nothing" if value is None else "a list")


def _hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    if value.lower() == "none":
        return "; write null for none"
    if value.lower() in ("true", "false"):
        return "; remove the quotes"
    try:
        float(value)
    except ValueError:
        return ""
    return "; remove the quotes, or wrap an environment variable as ${oc.decode:${oc.env:NAME}}"
