"""A prompt source that writes down what it is told. What it is not told (which step trained, what a finished group
looks like, when a save is made) its owner writes into the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from ..interfaces import PromptSource
from ..types import FrontierState, LiveCursor, Prompt
from .ledger import Ledger


class RecordedPrompts:
    """`PromptSource` around another one."""

    def __init__(self, prompts: PromptSource, ledger: Ledger):
        self._prompts = prompts
        self._ledger = ledger

    def next_prompt(self) -> Prompt:
        prompt = self._prompts.next_prompt()
        self._ledger.handed_out(prompt.ordinal)
        return prompt

    def settle_trained(self, ordinals: Sequence[int]) -> None:
        self._prompts.settle_trained(ordinals)

    def settle_dropped(self, ordinal: int, reason: str, *, replace: bool = True) -> None:
        self._prompts.settle_dropped(ordinal, reason, replace=replace)
        self._ledger.dropped(ordinal, reason)

    def put_back(self, ordinal: int) -> None:
        self._prompts.put_back(ordinal)
        self._ledger.returned([ordinal])

    def state(self) -> FrontierState | LiveCursor:
        return self._prompts.state()
