"""A tokenizer from a local Hugging Face directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..types import Problem
from .prompt_template import QUESTION_ONLY, PromptTemplate

log = logging.getLogger(__name__)

_MARK = "\u241eQUESTION\u241e"  # stands for the question while the chat template is rendered


class HFTokenizer:
    """transformers' AutoTokenizer. A prompt is the question, inside the chat template when there is one.

    A question that spells a special token ("<|im_end|>") is encoded as plain text: it cannot end the user's turn.
    """

    def __init__(
        self,
        name: str,
        template: PromptTemplate = QUESTION_ONLY,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Raises ConfigError when `name` is not a local tokenizer or has no end-of-sequence token."""
        self._tokenizer = _load(name)
        self._template = template
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"policy.tokenizer.name: the tokenizer in {name} has no eos_token, so that no completion could stop; "
                "set eos_token in its tokenizer_config.json"
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        self.pad_id: int = self._pad_id(name)
        self.vocab_size: int = len(self._tokenizer)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def _pad_id(self, name: str) -> int:
        if self._tokenizer.pad_token_id is not None:
            return self._tokenizer.pad_token_id
        log.warning("the tokenizer in %s has no pad_token; eos_token %r pads", name, self._tokenizer.eos_token)
        return self.eos_id

    def encode(self, text: str) -> list[int]:
        """Plain text: special tokens in it are characters, none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_prompt(self, problem: Problem) -> list[int]:
        question = self._template.render(problem)
        if not self._tokenizer.chat_template:
            return self._tokenizer.encode(question, split_special_tokens=True)
        if not any(token in question for token in self._tokenizer.all_special_tokens):
            return self._encode_with_specials(self._chat(question))
        before, _, after = self._chat(_MARK).partition(_MARK)
        return [*self._encode_with_specials(before), *self.encode(question), *self._encode_with_specials(after)]

    def _encode_with_specials(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _chat(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._chat_template_kwargs
        )


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"policy.tokenizer.name: no tokenizer can be loaded from {name}: {error}") from error
