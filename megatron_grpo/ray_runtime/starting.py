"""With what the collector starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..data.saved_prompts import StartPoint
from ..data.stream import EpochOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectorStart:
    """`at` None: nothing of the run is saved. `order`: the saved one of a resumed run. `buffered` (ordinal -> step):
    what the buffer holds."""

    at: StartPoint | None
    order: EpochOrder | None
    buffered: Mapping[int, int]
