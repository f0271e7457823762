"""Chooses the tokenizer of a run: built from the task (`policy.tokenizer.name: task`) or loaded from a directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..interfaces import Tokenizer
from ..types import Problem
from .hf_tokenizer import HFTokenizer
from .prompt_template import QUESTION_ONLY, PromptTemplate
from .task_tokenizer import TaskTokenizer

if TYPE_CHECKING:
    from ..config.schema import Recipe

__all__ = ["HFTokenizer", "TaskTokenizer", "build_tokenizer"]

TASK = "task"


def build_tokenizer(recipe: Recipe, problems: Iterable[Problem], solutions: Iterable[str] = ()) -> Tokenizer:
    """The run's tokenizer. `problems` are those of every split, `solutions` the texts of a warm start, if they differ
    from the answers: the task tokenizer knows no other characters."""
    prompt_file = recipe.data.default.prompt_file
    template = QUESTION_ONLY if prompt_file is None else PromptTemplate.from_file(Path(prompt_file))
    settings = recipe.policy.tokenizer
    if settings.name == TASK:
        return TaskTokenizer.from_problems(problems, solutions, template)
    return HFTokenizer(settings.name, template, settings.chat_template_kwargs)
