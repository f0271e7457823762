"""A prompt source without frontier accounting: the three fallbacks of a resumed run continue with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..interfaces import PromptSource
from ..types import LiveCursor, Prompt

log = logging.getLogger(__name__)


class UnalignedPrompts:
    """`PromptSource` around a stream that was restored at `frontier_at(cursor)`.

    Groups from a buffer without ordinals carry stand-ins below 0, which the stream has never heard of: they are kept
    away from it. Its state is the live cursor only.
    """

    def __init__(self, stream: PromptSource, cursor: LiveCursor):
        self._stream = stream
        self._cursor = cursor
        log.warning("data alignment is off for this run and all that resume from it: %s", cursor.reason)

    def next_prompt(self) -> Prompt:
        prompt = self._stream.next_prompt()
        position = max(self._cursor.position, prompt.ordinal + 1)
        self._cursor = LiveCursor(position=position, reason=self._cursor.reason)
        return prompt

    def settle_trained(self, ordinals: Sequence[int]) -> None:
        self._stream.settle_trained([ordinal for ordinal in ordinals if ordinal >= 0])

    def settle_dropped(self, ordinal: int, reason: str, *, replace: bool = True) -> None:
        self._stream.settle_dropped(ordinal, reason, replace=replace)

    def put_back(self, ordinal: int) -> None:
        if ordinal >= 0:
            self._stream.put_back(ordinal)
        else:
            log.warning("a group of an unknown prompt was evicted; it cannot be generated again")

    def state(self) -> LiveCursor:
        return self._cursor
