"""The ledger of a run and of all its restarts: what happened to every prompt, so that `verify` can prove it.

    ledger/history.jsonl        one line per old segment
    ledger/segment_000012.jsonl the young ones, event by event; each save ends one

What a crash loses from the end of a segment lies behind the last save and is void in any case, because a save waits
until the disk has the segment. It is owned by the process that owns the prompt stream: `saving` belongs into the same
turn of its event loop as reading the stream's state, with nothing awaited in between.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..types import TrajectoryGroup
from .segment import RunStart, Segment, line

LEDGER_NAME = "ledger"
_HISTORY = "history.jsonl"
_SEGMENT = re.compile(r"segment_(\d{6,})\.jsonl")


class Ledger:
    """Appends; never reads what happened before this run, except to sum it up.

    `num_detailed` closed segments keep their events; older ones become a line of the history. A segment that grows
    beyond `max_segment_bytes` is closed without a save. `next_attempt` counts the runs, from 1. All methods raise CheckpointError where the disk refuses.
    """

    def __init__(self, folder: Path, *, num_detailed: int = 3, max_segment_bytes: int = 32 << 20):
        self._folder = folder
        self._num_detailed = num_detailed
        self._max_segment_bytes = max_segment_bytes
        self._oldest_version: dict[int, int] = {}  # of finished groups that were not trained yet
        self._closed: deque[tuple[Path, Segment]] = deque()
        with self._explaining():
            folder.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(folder / _HISTORY)
            _remove_summed_up(folder)
            self._closed.extend(_young_segments(folder))
            self.next_attempt = 1 + sum(segment.start is not None for segment in read_segments(folder))
            numbers = [_number(path) for path, _ in self._closed]
            self._number = max([_last_in_history(folder), *numbers])
            self._open_next()

    def run_started(self, start: RunStart, oldest_versions: Mapping[int, int]) -> None:
        """`oldest_versions`: of every restored group, by ordinal."""
        self._oldest_version = dict(oldest_versions)
        held = {"held": list(start.held)}
        self._write({"run": {name: getattr(start, name) for name in RunStart.__slots__} | held})
        self.flush()

    def handed_out(self, ordinal: int) -> None:
        self._write({"out": ordinal})

    def generated(self, group: TrajectoryGroup) -> None:
        """A group is finished, whether or not it will be admitted."""
        stamps = [one.token_versions[one.loss_mask] for one in group.trajectories]
        oldest = min([int(stamp.min()) for stamp in stamps if len(stamp)] + [group.generation_version])
        newest = max([int(stamp.max()) for stamp in stamps if len(stamp)] + [group.generation_version])
        rewards = [one.reward for one in group.trajectories if one.masked_because is None]
        self._oldest_version[group.ordinal] = oldest
        self._write(
            {
                "gen": group.ordinal,
                "v": [oldest, newest],
                "len": [one.num_generated for one in group.trajectories],
                "r": round(sum(rewards) / len(rewards), 6) if rewards else None,
            }
        )

    def trained(self, step: int, ordinals: Sequence[int]) -> None:
        """The step ends here: what happened so far can be read by others."""
        versions = [self._oldest_version.pop(ordinal, None) for ordinal in ordinals]
        ages = [step - version for version in versions if version is not None]
        self._write({"train": step, "o": list(ordinals), "age": ages})
        self.flush()

    def dropped(self, ordinal: int, reason: str) -> None:
        self._oldest_version.pop(ordinal, None)
        self._write({"drop": ordinal, "why": reason})

    def returned(self, ordinals: Sequence[int]) -> None:
        """Evicted or cancelled: they will be handed out again."""
        for ordinal in ordinals:
            self._oldest_version.pop(ordinal, None)
        if ordinals:
            self._write({"back": list(ordinals)})

    def saving(self, step: int) -> None:
        """The stream's state of this moment goes into checkpoint `step`. Returns when the disk has all of it."""
        self._write({"save": step})
        self._next_segment()

    def flush(self) -> None:
        with self._explaining():
            self._file.flush()

    def close(self) -> None:
        """The end of a run. The young segments stay."""
        with self._explaining():
            self._file.close()

    # Inside

    def _write(self, event: Mapping[str, Any]) -> None:
        text = line(event)
        with self._explaining():
            self._segment.apply(event)
            self._file.write(text)
            self._num_bytes += len(text)
        if self._num_bytes > self._max_segment_bytes and "save" not in event:
            self._next_segment()

    def _next_segment(self) -> None:
        with self._explaining():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._closed.append((self._path, self._segment))
            self._open_next()

    def _open_next(self) -> None:
        self._sum_up()
        self._number += 1
        self._path = self._folder / f"segment_{self._number:06d}.jsonl"
        self._segment = Segment()
        self._num_bytes = 0
        self._file = self._path.open("x", buffering=1 << 16)
        _sync_directory(self._folder)

    def _sum_up(self) -> None:
        """The line first, then the events go: a segment that is in both counts once (`read_segments`)."""
        while len(self._closed) > self._num_detailed:
            path, segment = self._closed.popleft()
            with (self._folder / _HISTORY).open("a") as history:
                history.write(f"{_number(path)} {segment.to_line()}")
                history.flush()
                os.fsync(history.fileno())
            path.unlink()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the ledger {self._folder} cannot be written ({error}): make room, or give this user write access; "
                "the checkpoints written so far are intact"
            ) from error


def read_segments(folder: Path) -> list[Segment]:
    """All segments in order. A torn last line, which a killed process leaves, is ignored.

    Raises CheckpointError for a missing ledger, and for a line that is no event, named by file and number.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: no run with a ledger was started there")
    segments = []
    for number, text in _whole_lines(folder / _HISTORY):
        segment = Segment()
        _apply(segment, text.partition(" ")[2], folder / _HISTORY, number)
        segments.append(segment)
    return segments + [segment for _, segment in _young_segments(folder)]


def _young_segments(folder: Path) -> Iterator[tuple[Path, Segment]]:
    last_summed_up = _last_in_history(folder)
    for path in sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name)):
        if _SEGMENT.fullmatch(path.name) and _number(path) > last_summed_up:
            segment = Segment()
            for number, text in _whole_lines(path):
                _apply(segment, text, path, number)
            yield path, segment


def _apply(segment: Segment, text: str, path: Path, number: int) -> None:
    try:
        segment.apply(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} line {number} is damaged: {error!r}: {text[:80]}") from error


def _whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    if path.is_file():
        with path.open() as file:
            yield from ((number, text) for number, text in enumerate(file, 1) if text.endswith("\n"))


def _last_in_history(folder: Path) -> int:
    last = 0
    for number, text in _whole_lines(folder / _HISTORY):
        head = text.partition(" ")[0]
        if not head.isdecimal():
            raise CheckpointError(f"{folder / _HISTORY} line {number} is damaged: {text[:80]}")
        last = int(head)
    return last


def _number(path: Path) -> int:
    match = _SEGMENT.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _cut_torn_line(path: Path) -> None:
    """What follows would be glued to it."""
    if path.is_file():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def _remove_summed_up(folder: Path) -> None:
    """A process killed between the line of a segment and the removal of its events left these."""
    last = _last_in_history(folder)
    for path in folder.iterdir():
        if _SEGMENT.fullmatch(path.name) and _number(path) <= last:
            path.unlink()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
