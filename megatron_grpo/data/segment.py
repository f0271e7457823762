"""One stretch of the ledger: what happened to prompts between two saves. As events while it is young, as one line later.

Events, one JSON object a line, told apart by their first key:

    {"run": {...}}                                       a run started; everything after the save it resumed from is void
    {"out": 5}                                           prompt 5 was handed out
    {"gen": 5, "v": [3, 4], "len": [7, 9], "r": 0.5}     its group is finished: oldest and newest version, lengths, mean reward
    {"train": 4, "o": [5, 6], "age": [1, 0]}             step 4 trained these prompts, of these ages
    {"drop": 5, "why": "zero_variance"}                  it will never be trained
    {"back": [5]}                                        it was neither trained nor dropped, and is handed out again
    {"save": 5}                                          the state at this point is what checkpoint 5 holds
    {"sum": {...}}                                       a whole stretch in one line, ordinals as ranges [first, last]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..types import DroppedPrompt

Ranges = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """`held`: prompts of the restored groups; `cut`: where the stream continues; the rest describes the order of the
    data (see `EpochOrder`). `unaligned_because`: the run has no frontier accounting, so that prompts may be lost.
    """

    attempt: int
    start_step: int
    cut: int
    held: tuple[int, ...]
    num_rows: int
    num_served: int
    unaligned_because: str | None = None


@dataclass(kw_only=True, slots=True)
class Segment:
    """Grows event by event; ordinals in the order of the events (or ascending, once they went through a line)."""

    start: RunStart | None = None
    handed_out: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    dropped: list[DroppedPrompt] = field(default_factory=list)
    num_returned: int = 0
    num_generated: int = 0
    oldest_age: int | None = None
    saved_step: int | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no event."""
        match event:
            case {"out": ordinal}:
                self.handed_out.append(ordinal)
            case {"gen": _}:
                self.num_generated += 1
            case {"train": step, "o": ordinals, "age": ages}:
                self.steps.append(step)
                self.trained.extend(ordinals)
                self._note_age(max(ages, default=None))
            case {"drop": ordinal, "why": reason}:
                self.dropped.append(DroppedPrompt(ordinal=ordinal, reason=reason))
            case {"back": ordinals}:
                self.num_returned += len(ordinals)
            case {"save": step}:
                self.saved_step = step
            case {"run": start}:
                self.start = RunStart(**{**start, "held": tuple(start["held"])})
            case {"sum": summary}:
                self._apply_summary(summary)
            case _:
                raise ValueError("not an event of the ledger")

    def to_line(self) -> str:
        """The whole segment as one `sum` event; the order of events inside it is forgotten."""
        reasons = sorted({one.reason for one in self.dropped})
        summary = {
            "run": None if self.start is None else asdict(self.start),
            "out": to_ranges(self.handed_out),
            "trained": to_ranges(self.trained),
            "steps": to_ranges(self.steps),
            "dropped": {why: to_ranges(one.ordinal for one in self.dropped if one.reason == why) for why in reasons},
            "returned": self.num_returned,
            "generated": self.num_generated,
            "oldest_age": self.oldest_age,
            "save": self.saved_step,
        }
        return line({"sum": summary})

    def _apply_summary(self, summary: Mapping[str, Any]) -> None:
        if summary["run"] is not None:
            self.apply({"run": summary["run"]})
        self.handed_out += from_ranges(summary["out"])
        self.trained += from_ranges(summary["trained"])
        self.steps += from_ranges(summary["steps"])
        for reason, ranges in summary["dropped"].items():
            self.dropped += [DroppedPrompt(ordinal=ordinal, reason=reason) for ordinal in from_ranges(ranges)]
        self.num_returned += summary["returned"]
        self.num_generated += summary["generated"]
        self._note_age(summary["oldest_age"])
        self.saved_step = summary["save"]

    def _note_age(self, age: int | None) -> None:
        if age is not None:
            self.oldest_age = age if self.oldest_age is None else max(age, self.oldest_age)


def line(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


def to_ranges(ordinals: Iterable[int]) -> Ranges:
    """Ascending; what occurs twice stays twice: 4, 5, 5, 6 -> [4, 5], [5, 6]."""
    ranges: Ranges = []
    for ordinal in sorted(ordinals):
        if ranges and ordinal == ranges[-1][1] + 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return ranges


def from_ranges(ranges: Ranges) -> list[int]:
    return [ordinal for first, last in ranges for ordinal in range(first, last + 1)]
