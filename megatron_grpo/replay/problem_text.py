"""Problems as JSON text that gives back exactly what was put in. Environments choose their metadata; files hold it.

JSON has neither tuples nor keys other than strings, and verifiers' data has both (`reasoning-gym` states ranges as
tuples): {"$tuple": [3, 4]} and {"$pairs": [[1, "a"]]} stand for (3, 4) and {1: "a"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..types import Problem

_TUPLE, _PAIRS = "$tuple", "$pairs"
_SCALARS = frozenset({bool, int, float, str})


def problem_to_text(problem: Problem) -> str:
    """Raises TypeError naming the key of a value that no JSON text can give back."""
    if unknown := [key for key in problem.metadata if type(key) is not str]:
        raise TypeError(f"the metadata keys {unknown} are not strings")
    try:
        metadata = {key: _encode(value) for key, value in problem.metadata.items()}
    except TypeError:
        raise TypeError(next(_strangers(dict(problem.metadata), "metadata"))) from None
    return json.dumps([problem.question, problem.answer, metadata], ensure_ascii=False)


def problem_from_text(text: str) -> Problem:
    """Raises ValueError for a text that `problem_to_text` did not write."""
    try:
        question, answer, metadata = json.loads(text)
        decoded = {key: _decode(value) for key, value in metadata.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"a problem is not the JSON text of [question, answer, metadata]: {error}") from error
    return Problem(question=str(question), answer=str(answer), metadata=decoded)


def _encode(value: Any) -> Any:
    # Exact types: a subclass (an enum, a numpy float) would come back as something else.
    if value is None or type(value) in _SCALARS:
        return value
    if type(value) is list:
        return [_encode(inner) for inner in value]
    if type(value) is tuple:
        return {_TUPLE: [_encode(inner) for inner in value]}
    if type(value) is not dict:
        raise TypeError
    plain = {key: _encode(inner) for key, inner in value.items()}
    if all(type(key) is str and key[:1] != "$" for key in plain):
        return plain
    return {_PAIRS: [[_encode(key), inner] for key, inner in plain.items()]}


def _strangers(value: Any, where: str) -> Iterator[str]:
    """Where values that JSON cannot hold are, and what they are. Slow, and only asked for when there is one."""
    if type(value) in (list, tuple):
        for place, inner in enumerate(value):
            yield from _strangers(inner, f"{where}[{place}]")
    elif type(value) is dict:
        for key, inner in value.items():
            yield from _strangers(key, f"a key of {where}")
            yield from _strangers(inner, f"{where}[{key!r}]")
    elif value is not None and type(value) not in _SCALARS:
        yield f"{where} is a {type(value).__name__}, which JSON cannot hold"


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_decode(inner) for inner in value[_TUPLE])
    if _PAIRS in value:
        return {_decode(key): _decode(inner) for key, inner in value[_PAIRS]}
    return {key: _decode(inner) for key, inner in value.items()}
