"""Which ordinals were handed out, which are settled, and from where a resumed run continues. Knows no rows.

An ordinal is *pending* from hand-out until it is *settled*: trained, or dropped. `cut = min(pending + {next})`: all
below is settled, so a resumed stream starts there. Example: trained 0-4 and 6, pending 5 and 7, next 8: cut 5,
frontier 7, trained above the cut [6].
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable

from ..types import FrontierState

log = logging.getLogger(__name__)


class Frontier:
    """Accounting of one prompt stream. O(log n) amortised per ordinal, n = ordinals between the cut and next.

    Nothing below the cut is remembered, so memory is bounded by that distance too.
    """

    def __init__(self) -> None:
        self._next = 0
        self._cut = 0
        self._frontier = 0
        self._pending: set[int] = set()
        self._pending_heap: list[int] = []  # settled entries are dropped when they reach the top
        self._trained: set[int] = set()
        self._dropped: set[int] = set()

    @classmethod
    def restore(cls, state: FrontierState, held: Iterable[int]) -> Frontier:
        """Continue from `state`; `held` are the ordinals of restored groups: pending, and never handed out.

        They must not advance `next`: a save made before the ordinals between the cut and them were handed out
        again would lose those for ever. Raises ValueError for a held ordinal that the state calls settled.
        """
        frontier = cls()
        frontier._next = frontier._cut = state.cut
        frontier._frontier = state.frontier
        frontier._trained.update(state.trained_above_cut)
        frontier._dropped.update(state.dropped_above_cut)
        for ordinal in held:
            if ordinal < state.cut or ordinal in frontier._trained or ordinal in frontier._dropped:
                raise ValueError(f"a restored group holds prompt {ordinal}, which the data state calls settled")
            frontier._mark_pending(ordinal)
        return frontier

    @property
    def cut(self) -> int:
        return self._cut

    def is_pending(self, ordinal: int) -> bool:
        return ordinal in self._pending

    def peek(self) -> int:
        """The ordinal that `hand_out` would return."""
        while self._next in self._pending or self._next in self._trained or self._next in self._dropped:
            self._next += 1  # settled or held by a restored group: not handed out again
        return self._next

    def hand_out(self) -> int:
        ordinal = self.peek()
        self._next = ordinal + 1
        self._mark_pending(ordinal)
        return ordinal

    def settle_trained(self, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            self._leave_pending(ordinal)
            self._trained.add(ordinal)
            self._frontier = max(self._frontier, ordinal + 1)
        self._advance_cut()

    def settle_dropped(self, ordinal: int) -> None:
        self._leave_pending(ordinal)
        self._dropped.add(ordinal)
        self._advance_cut()

    def state(self) -> FrontierState:
        if self._cut < self._frontier:
            log.info("data cut %d lies below the trained frontier %d: earlier prompts wait", self._cut, self._frontier)
        return FrontierState(
            cut=self._cut,
            frontier=self._frontier,
            trained_above_cut=tuple(sorted(self._trained)),
            dropped_above_cut=tuple(sorted(self._dropped)),
        )

    def _mark_pending(self, ordinal: int) -> None:
        assert ordinal not in self._pending, f"prompt {ordinal} is pending twice"
        self._pending.add(ordinal)
        heapq.heappush(self._pending_heap, ordinal)

    def _leave_pending(self, ordinal: int) -> None:
        assert ordinal in self._pending, f"prompt {ordinal} is settled, but it is not pending"
        self._pending.remove(ordinal)

    def _advance_cut(self) -> None:
        while self._pending_heap and self._pending_heap[0] not in self._pending:
            heapq.heappop(self._pending_heap)
        lowest = min([self.peek(), *self._pending_heap[:1]])
        for ordinal in range(self._cut, lowest):
            self._trained.discard(ordinal)
            self._dropped.discard(ordinal)
        self._cut = lowest
