"""From an `env.NAME` block of the recipe to an environment object. The one place that imports by name."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from ...config.schema import EnvironmentBlock
from ...data.stream import PromptRow
from ...errors import ConfigError
from ...interfaces import Environment

_PACKAGE = __name__.rpartition(".")[0]
BUILT_IN: Mapping[str, str] = {
    "math": f"{_PACKAGE}:MathVerify",
    "reasoning_gym": f"{_PACKAGE}:ReasoningGym",
    "sort_digits": f"{_PACKAGE}:SortDigits",
}
METHODS = ("problems", "score", "is_correct", "solution")
_NOT_FOR_THE_CLASS = ("target", "num_workers")


def build_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment of the block `env.NAME`: `options` is the whole block, `target` and `num_workers` included.

    Raises ConfigError naming `env.NAME.target` when the class cannot be imported, lacks a method or rejects an option.
    """
    key = f"env.{name}.target"
    target = options.get("target") or BUILT_IN.get(name)
    if target is None:
        raise ConfigError(f"{key} is missing: set it to module:Class, or use a built-in name ({', '.join(BUILT_IN)})")
    environment_class = _import(key, target)
    missing = [method for method in METHODS if not _has_method(environment_class, method)]
    if missing:
        raise ConfigError(f"{key}: {target} lacks {', '.join(missing)}; an environment has {', '.join(METHODS)}")
    arguments = {option: value for option, value in options.items() if option not in _NOT_FOR_THE_CLASS}
    return _construct(key, target, environment_class, arguments)


def blocks_in_use(
    blocks: Mapping[str, EnvironmentBlock], rows: Iterable[PromptRow]
) -> dict[str, EnvironmentBlock]:
    """The `env` blocks that a prompt names: a recipe may inherit others, whose workers would only cost memory."""
    named = {row.env_name for row in rows}
    return {name: block for name, block in blocks.items() if name in named}


def _import(key: str, target: str) -> type:
    module_name, separator, class_name = target.partition(":")
    if not separator or not module_name or not class_name:
        raise ConfigError(f"{key} is {target!r}; it must read module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except AttributeError:
        raise ConfigError(f"{key}: module {module_name} has no class {class_name}") from None
    except Exception as error:  # importing runs the user's code, which may fail in any way
        raise ConfigError(f"{key}: {module_name} cannot be imported: {_in_words(error)}") from error
    if not inspect.isclass(found):
        raise ConfigError(f"{key}: {target} is a {type(found).__name__}, not a class")
    return found


def _has_method(environment_class: type, method: str) -> bool:
    return callable(getattr(environment_class, method, None))


def _construct(key: str, target: str, environment_class: type, arguments: Mapping[str, Any]) -> Environment:
    """Messages name the options, not their values: a value may be a secret taken from the environment."""
    try:
        inspect.signature(environment_class).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: {target} does not take the options {list(arguments)}: {error}") from None
    try:
        return environment_class(**arguments)
    except Exception as error:  # the constructor is the user's code, which may fail in any way
        raise ConfigError(f"{key}: {target} refused the options {list(arguments)}: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
