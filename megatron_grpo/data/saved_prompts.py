"""The prompt source of a run that saves: it starts where a checkpoint says, writes the ledger and gives its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..interfaces import PromptSource
from ..types import FrontierState, LiveCursor
from .ledger import Ledger
from .recorded import RecordedPrompts
from .segment import RunStart
from .stream import PromptStream
from .stream_state import StreamState, frontier_at
from .unaligned import UnalignedPrompts


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPoint:
    """Where the run starts: `step` 0 and no `point` for a fresh one. `oldest_versions`: of every restored group."""

    step: int
    point: FrontierState | LiveCursor | None
    oldest_versions: Mapping[int, int]


class SavedPrompts:
    """Owned, with `ledger`, by the event loop that collects. `source` is what the collector draws from."""

    def __init__(self, stream: PromptStream, ledger: Ledger, start: StartPoint, *, rows_digest: str):
        self._stream = stream
        self._ledger = ledger
        self._rows_digest = rows_digest
        self.source: PromptSource = RecordedPrompts(self._restored(start), ledger)
        self._note_start(start)

    def state_for(self, step: int) -> StreamState:
        """The state of this moment, which checkpoint `step` will hold; the ledger is on the disk up to here."""
        state = self.source.state()
        self._ledger.saving(step)
        aligned = isinstance(state, FrontierState)
        return StreamState(
            order=self._stream.order,
            cursor=self._stream.next_ordinal if aligned else state.position,
            frontier=state if aligned else None,
            unaligned_because=None if aligned else state.reason,
            rows_digest=self._rows_digest,
        )

    def _restored(self, start: StartPoint) -> PromptSource:
        match start.point:
            case FrontierState() as state:
                self._stream.restore(state, start.oldest_versions)
            case LiveCursor() as cursor:
                self._stream.restore(frontier_at(cursor), ())
                return UnalignedPrompts(self._stream, cursor)
        return self._stream

    def _note_start(self, start: StartPoint) -> None:
        point = start.point
        cut = point.cut if isinstance(point, FrontierState) else 0 if point is None else point.position
        run = RunStart(
            attempt=self._ledger.next_attempt,
            start_step=start.step,
            cut=cut,
            held=tuple(start.oldest_versions),
            num_rows=self._stream.order.num_rows,
            num_served=self._stream.order.num_served,
            unaligned_because=point.reason if isinstance(point, LiveCursor) else None,
        )
        self._ledger.run_started(run, start.oldest_versions)
