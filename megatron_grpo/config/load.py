"""Recipe file -> validated recipe, or one ConfigError that lists every problem.

The stages, each a small module: layers of files and overrides (`sources`), `${...}` (`interpolation`), keys that are
accepted but not read (`unsupported`), two names of one setting (`aliases`), types and ranges (`schema`), rules across
keys (`rules`). Each stage drops the keys it refused and hands on the rest, so that later stages report too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError
from .aliases import unify
from .availability import not_available_yet
from .explain import MUST_BE_GIVEN, explain
from .facts import Facts, gather
from .ineffective import keys_without_effect
from .interpolation import Resolved, resolve
from .names import schema_defaults
from .rules import broken_rules, cautions
from .schema import Recipe
from .sources import KeyPath, Sources, leaves, merge, read_sources, value_at
from .unsupported import remove_unsupported

Problem = tuple[KeyPath, str]
_KEYS = re.compile(r"\b[a-z]\w*(?:\.\w+)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRecipe:
    """A valid recipe and what is worth telling about it.

    `resolved` is the whole recipe with every default; what came from the environment is shown as its expression.
    `explicit_keys` are those that the named file or the command line sets (not inherited ones).
    """

    recipe: Recipe
    path: Path
    resolved: dict[str, Any]
    explicit_keys: frozenset[str]
    facts: Facts
    unreadable: tuple[str, ...]  # model or data files that are not here: `train` refuses, `check` warns
    ineffective: tuple[str, ...]  # keys the recipe sets itself, without effect in its mode: `--strict` refuses
    cautions: tuple[str, ...]
    notes: tuple[str, ...]  # valid, but not available in this version: `train` refuses

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.unreadable, *self.ineffective, *self.cautions)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, resolve and validate. Raises ConfigError with every problem found."""
    sources = read_sources(path, overrides)
    given = merge(layer.values for layer in sources.layers)
    resolved = resolve(given, schema_defaults())
    unified = unify(resolved.values, sources.last_set())
    removed = remove_unsupported(unified.values)
    recipe, invalid = _validate(removed.values)
    problems = [*resolved.problems, *unified.problems, *removed.problems, *invalid]
    if recipe is None:
        raise ConfigError(_messages(problems, (), sources, resolved))
    facts = gather(recipe)
    rule_problems = _worth_telling(broken_rules(recipe, facts), problems) if sources.complete else []
    if sources.problems or problems or rule_problems:
        raise ConfigError(_messages(problems, rule_problems, sources, resolved))
    return _loaded(recipe, facts, Path(path), sources, resolved)


def _worth_telling(broken: Iterable[str], problems: Iterable[Problem]) -> list[str]:
    """Broken rules, less those about a key that was refused already: they judge its default, not what is written."""
    refused = [key for key, _ in problems]
    return [text for text in broken if not any(_overlap(named, refused) for named in _KEYS.findall(text))]


def _overlap(named: str, keys: Iterable[KeyPath]) -> bool:
    """Whether `named` is one of the keys, lies inside one or contains one."""
    path = tuple(named.split("."))
    return any(path[: len(key)] == key[: len(path)] for key in keys)


def _loaded(recipe: Recipe, facts: Facts, path: Path, sources: Sources, resolved: Resolved) -> LoadedRecipe:
    own = merge(layer.values for layer in sources.layers if layer.itself)
    explicit = frozenset(".".join(key) for key in leaves(own))
    claims = frozenset(".".join(key) for key in leaves(own) if value_at(own, key) is not None)  # null asks for nothing
    return LoadedRecipe(
        recipe=recipe,
        path=path,
        resolved=_shown(recipe, resolved),
        explicit_keys=explicit,
        facts=facts,
        unreadable=tuple(_mask(facts.unreadable, resolved)),
        ineffective=tuple(_mask(keys_without_effect(recipe, claims), resolved)),
        cautions=tuple(_mask(cautions(recipe), resolved)),
        notes=tuple(_mask(not_available_yet(recipe), resolved)),
    )


def _validate(values: dict[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """The recipe without the keys that are wrong, and what is wrong with them. None: nothing usable is left.

    A section that lost a required key goes as a whole, in the next round.
    """
    problems: dict[KeyPath, str] = {}
    for _ in range(3):
        try:
            return Recipe.model_validate(values), list(problems.items())
        except ValidationError as error:
            found = explain(error)
            values = _without(values, [key[:-1] if text == MUST_BE_GIVEN else key for key, text in found])
            problems = dict(found) | problems
    return None, list(problems.items())


def _without(values: Any, keys: Iterable[KeyPath]) -> Any:
    keys = list(keys)
    if not isinstance(values, dict):
        return values
    kept = {name: value for name, value in values.items() if (name,) not in keys}
    return {name: _without(value, [key[1:] for key in keys if key[0] == name]) for name, value in kept.items()}


def _shown(recipe: Recipe, resolved: Resolved) -> dict[str, Any]:
    """The recipe as plain values, environment expressions in place of what they gave."""
    return _overlay(_plain(recipe.model_dump(mode="python", by_alias=True)), resolved.values, resolved.shown)


def _overlay(dumped: Any, values: Any, shown: Any) -> Any:
    if isinstance(dumped, dict) and isinstance(values, dict) and isinstance(shown, dict):
        return {key: _overlay(value, values.get(key), shown.get(key)) for key, value in dumped.items()}
    return dumped if values == shown else shown


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _messages(problems: list[Problem], rule_problems: Sequence[str], sources: Sources, resolved: Resolved) -> list[str]:
    """Every problem once, with the file and line of its key, environment values masked."""
    located = [_located(key, text, sources) for key, text in problems]
    ruled = [text + sources.places(tuple(key.split(".")) for key in _KEYS.findall(text)) for text in rule_problems]
    return list(dict.fromkeys(_mask([*sources.problems, *located, *ruled], resolved)))


def _located(key: KeyPath, text: str, sources: Sources) -> str:
    return f"{'.'.join(key)}: {text}{sources.places([key])}"


def _mask(texts: Iterable[str], resolved: Resolved) -> list[str]:
    masked = []
    for text in texts:
        for secret, expression in sorted(resolved.secrets.items(), key=lambda item: -len(item[0])):
            text = text.replace(secret, expression) if len(secret) > 3 else text
        masked.append(text)
    return masked
