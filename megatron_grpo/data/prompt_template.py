"""The text around a question. Braces other than the placeholder stay as they are, so that LaTeX needs no escaping."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..types import Problem

PLACEHOLDER = "{problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTemplate:
    """`text` contains the placeholder `{problem}` once."""

    text: str = PLACEHOLDER

    @classmethod
    def from_file(cls, path: Path) -> PromptTemplate:
        """Read `data.default.prompt_file`; DataError when it is unreadable or has not exactly one placeholder."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.default.prompt_file {path} cannot be read: {error}") from error
        if text.count(PLACEHOLDER) != 1:
            raise DataError(
                f"data.default.prompt_file {path} has the placeholder {PLACEHOLDER} {text.count(PLACEHOLDER)} times; "
                "it must stand exactly once, where the question goes"
            )
        return cls(text=text)

    def render(self, problem: Problem) -> str:
        return self.text.replace(PLACEHOLDER, problem.question)


QUESTION_ONLY = PromptTemplate()
