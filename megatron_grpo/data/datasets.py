"""From the recipe's `data.train` / `data.validation` to problems, and from problems to prompt rows.

A broken line stops the run (file and line named). A row that is whole but of no use (field missing, null or no text, or
too long for the model) is skipped; each reason is logged with its count and the first rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, DataError, MegatronGrpoError
from ..interfaces import Environment, Tokenizer
from ..types import Problem
from .files import FileRow, read_rows
from .stream import PromptRow

if TYPE_CHECKING:
    from ..config.schema import Recipe

log = logging.getLogger(__name__)

SplitName = Literal["train", "validation"]
_TEXT_COLUMNS = ("problem", "expected_answer")
_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The problems of one split, all of one environment. `skipped` counts unusable rows by reason."""

    env_name: str
    problems: tuple[Problem, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)


def load_split(recipe: Recipe, split: SplitName, environment_for: Callable[[str], Environment]) -> Split | None:
    """The problems of `data.train` or `data.validation`; None when the recipe has no such block.

    `environment_for` builds the environment `env.NAME`; it is asked only when the environment generates the problems.
    """
    block = recipe.data.train if split == "train" else recipe.data.validation
    if block is None:
        return None
    if block.env is None:  # the schema has filled in data.default.env_name
        raise ConfigError(f"data.{split} names no environment: set data.{split}.env or data.default.env_name")
    if block.path is not None:
        return load_file(Path(block.path), block.env)
    if block.num_rows is None:
        raise ConfigError(f"data.{split} needs a path, or num_rows for the environment {block.env!r} to generate")
    return _generated(environment_for(block.env), block.env, split, block.num_rows, block.seed)


def load_file(path: Path, env_name: str) -> Split:
    """Problems of a file with the columns `problem` and `expected_answer`; other columns become their metadata."""
    rows = read_rows(path)
    skipped = Skipped(f"{path}")
    problems = []
    for row in rows:
        reason = why_unusable(row.values)
        if reason is None:
            problems.append(_problem(row))
        else:
            skipped.add(reason, _row_name(row))
    skipped.log(len(rows))
    return Split(env_name=env_name, problems=tuple(problems), skipped=skipped.counts)


def why_unusable(values: Mapping[str, Any]) -> str | None:
    """What is wrong with a row, naming the field, or None."""
    for column in _TEXT_COLUMNS:
        if column not in values:
            return f"{column} is missing"
        value = values[column]
        if value is None:
            return f"{column} is null"
        if not isinstance(value, str):
            return f"{column} is of type {type(value).__name__}, not text"
        if not _is_unicode(value):
            return f"{column} is not valid Unicode"
    return "problem is blank" if not values["problem"].strip() else None


def encode_rows(
    problems: Sequence[Problem], tokenizer: Tokenizer, *, env_name: str, max_prompt_tokens: int, source: str = "data"
) -> list[PromptRow]:
    """Prompt rows in order; prompts of more than `max_prompt_tokens` tokens, or of none, are skipped and logged."""
    rows = []
    skipped = Skipped(source)
    for problem in problems:
        token_ids = tuple(tokenizer.encode_prompt(problem))
        if 0 < len(token_ids) <= max_prompt_tokens:
            rows.append(PromptRow(token_ids=token_ids, env_name=env_name, problem=problem))
        elif token_ids:
            skipped.add(f"longer than {max_prompt_tokens} tokens", f"{problem.question[:40]!r} ({len(token_ids)})")
        else:
            skipped.add("no token at all", f"{problem.question[:40]!r}")
    skipped.log(len(problems))
    return rows


def max_prompt_tokens(recipe: Recipe) -> int:
    """The longest prompt that is used: data.max_input_seq_length, and room for one new token in the model's length."""
    limits = [recipe.policy.max_total_sequence_length - 1]
    if recipe.data.max_input_seq_length is not None:
        limits.append(recipe.data.max_input_seq_length)
    return min(limits)


def require_rows(
    num_rows: int, num_prompts_per_step: int, source: str, *, num_too_long: int = 0, max_tokens: int = 0
) -> None:
    """Raise DataError unless the rows fill at least one step. `num_too_long` were skipped for their length."""
    if num_rows < num_prompts_per_step <= num_rows + num_too_long:
        raise DataError(
            f"{source}: {num_too_long} of {num_rows + num_too_long} prompts were skipped because they are longer than "
            f"{max_tokens} tokens, and the rest does not fill grpo.num_prompts_per_step = {num_prompts_per_step}: raise "
            "policy.max_total_sequence_length or data.max_input_seq_length"
        )
    if num_rows < num_prompts_per_step:
        raise DataError(
            f"{source} has {num_rows} usable prompts, fewer than grpo.num_prompts_per_step = {num_prompts_per_step}: "
            "no step could be filled; add rows or lower grpo.num_prompts_per_step"
        )


class Skipped:
    """Unusable rows of one source, by reason."""

    def __init__(self, source: str):
        self._source = source
        self._names: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        self._names.setdefault(reason, []).append(name)

    @property
    def counts(self) -> dict[str, int]:
        return {reason: len(names) for reason, names in self._names.items()}

    def log(self, num_rows: int) -> None:
        """One warning per reason, with the first rows it hit."""
        for reason, names in self._names.items():
            shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
            log.warning("%s: skipped %d of %d rows: %s: %s", self._source, len(names), num_rows, reason, shown)


def _generated(environment: Environment, env_name: str, split: SplitName, num_rows: int, seed: int) -> Split:
    try:
        problems = tuple(environment.problems(split, num_rows, seed))
    except MegatronGrpoError:
        raise
    except Exception as error:  # the user's code, which may fail in any way
        raise DataError(f"env.{env_name}: problems() failed: {type(error).__name__}: {error}") from error
    for problem in problems:
        if not isinstance(problem, Problem):
            raise DataError(f"env.{env_name}: problems() returned a {type(problem).__name__}; expected types.Problem")
    log.info("data.%s: %d problems of the environment %s", split, len(problems), env_name)
    return Split(env_name=env_name, problems=problems)


def _problem(row: FileRow) -> Problem:
    metadata = {column: value for column, value in row.values.items() if column not in _TEXT_COLUMNS}
    return Problem(question=row.values["problem"], answer=row.values["expected_answer"], metadata=metadata)


def _row_name(row: FileRow) -> str:
    return f"{row.values['id']} ({row.where})" if "id" in row.values else row.where


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and no tokenizer can encode
        return False
    return True
