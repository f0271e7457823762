"""A small tokenizer for one task: one id per character, and one per word of the fixed question template.

A word counts as template when it stands in nearly every question; with its leading space it is one token. The prompt of
"Spell this word backward (example: sun -> nus): both" is then 14 tokens instead of 53.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from ..errors import DataError
from ..types import Problem
from .prompt_template import QUESTION_ONLY, PromptTemplate

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
_SPECIALS = (PAD, BOS, EOS)
_TEMPLATE_SHARE = 0.9
_WORD = re.compile(r"\s?\S+")


class TaskTokenizer:
    """`decode(encode(text)) == text` for every text over the task's characters. Prompts start with `<bos>`.

    Specials are never read from text: "<eos>" in a question is five characters. `decode` shows them, so that a
    response with a stray special does not equal the right answer.
    """

    def __init__(self, vocabulary: Sequence[str], template: PromptTemplate = QUESTION_ONLY):
        """`vocabulary[i]` is the text of id i; the three specials come first."""
        assert tuple(vocabulary[:3]) == _SPECIALS, f"the vocabulary starts with {vocabulary[:3]}, not {_SPECIALS}"
        self.vocabulary = tuple(vocabulary)
        self.vocab_size = len(vocabulary)
        self.pad_id, self.bos_id, self.eos_id = range(3)
        self._template = template
        self._characters = frozenset(token for token in vocabulary[3:] if len(token) == 1)
        self._backend = _backend(self.vocabulary)

    @classmethod
    def from_problems(
        cls, problems: Iterable[Problem], solutions: Iterable[str] = (), template: PromptTemplate = QUESTION_ONLY
    ) -> TaskTokenizer:
        """The vocabulary of all prompts, answers and solutions; the same for the same texts in any order."""
        problems = list(problems)
        prompts = [template.render(problem) for problem in problems]
        answers = [problem.answer for problem in problems]
        characters = sorted({character for text in (*prompts, *answers, *solutions) for character in text})
        return cls([*_SPECIALS, *characters, *_template_words(prompts)], template)

    def encode(self, text: str) -> list[int]:
        """Raises DataError naming the first character that the task's texts do not have."""
        unknown = [character for character in text if character not in self._characters]
        if unknown:
            raise DataError(
                f"the task tokenizer has no token for {unknown[0]!r} (U+{ord(unknown[0]):04X}) in {text!r:.80}: "
                "it knows only the characters of the problems it was built from"
            )
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Raises ValueError for an id outside the vocabulary: an engine must not sample a model's padding rows."""
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the task tokenizer's {self.vocab_size} ids")
        return "".join(self.vocabulary[token] for token in ids)

    def encode_prompt(self, problem: Problem) -> list[int]:
        return [self.bos_id, *self.encode(self._template.render(problem))]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers and vLLM load."""
        folder.mkdir(parents=True, exist_ok=True)
        backend = _backend(self.vocabulary)
        backend.add_special_tokens(list(_SPECIALS))
        backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _template_words(prompts: Sequence[str]) -> list[str]:
    """Words (leading space included, two characters or more) that stand in nearly every prompt, sorted."""
    seen = Counter(word for prompt in prompts for word in set(_WORD.findall(prompt)))
    return sorted(word for word, count in seen.items() if len(word) > 1 and count >= _TEMPLATE_SHARE * len(prompts))


def _backend(vocabulary: Sequence[str]) -> tokenizers.Tokenizer:
    """Split into template words that stand alone, else characters; every piece is then one vocabulary entry."""
    words = sorted((token for token in vocabulary[3:] if len(token) > 1), key=len, reverse=True)
    pieces = [rf"(?:(?<!\S)|(?=\s)){re.escape(word)}(?!\S)" for word in words]
    pattern = tokenizers.Regex("|".join([*pieces, r"[\s\S]"]))
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=PAD)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return backend
