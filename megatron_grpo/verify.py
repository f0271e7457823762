"""`megatron-grpo verify RUN_DIR`: was every prompt trained once? Reads the ledger of a run and of all its restarts.

A restart continues from a checkpoint: what came after that save is *void*, not repeated. What remains is one history:

    trained     once; twice is *repeated*, and so is a prompt that was trained although it had been dropped
    dropped     with its reason; listed, and no fault
    pending     handed out (or held by a restored group) in the last run, and not settled when it ended
    skipped     a prompt that the stream has passed and that is none of these

The verdict follows from what was handed out and what was trained, not from what the frontier accounting believes;
of that, only the cut of a restart is used: nothing below it may be missing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from .data.ledger import LEDGER_NAME, read_segments
from .data.segment import Ranges, RunStart, Segment, to_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Ordinals are ascending. `problems` are sentences about the ledger itself: a gap in it proves nothing."""

    num_attempts: int
    num_steps: int
    num_void_steps: int
    num_trained: int
    num_pending: int
    num_returned: int
    oldest_age: int | None
    skipped: tuple[int, ...]
    repeated: tuple[int, ...]
    dropped: Mapping[str, tuple[int, ...]]
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.skipped or self.repeated or self.problems else 0


def verify(run_dir: Path) -> Verdict:
    """Raises CheckpointError when there is no ledger, or a line of it cannot be read."""
    return judge(read_segments(run_dir / LEDGER_NAME))


def run_verify(run_dir: Path, *, as_json: bool = False) -> int:
    verdict = verify(run_dir)
    record = json.dumps(asdict(verdict) | {"exit_code": verdict.exit_code})
    sys.stdout.write(f"{record if as_json else format_verdict(verdict)}\n")
    return verdict.exit_code


def judge(segments: Sequence[Segment]) -> Verdict:
    history = _History()
    for segment in segments:
        history.append(segment)
    valid = history.valid
    trained = [ordinal for segment in valid for ordinal in segment.trained if ordinal >= 0]
    dropped = {reason: ordinals for reason, ordinals in _dropped(valid)}
    settled = set(trained).union(*dropped.values())
    pending = history.handed_out_by_last_run - settled
    return Verdict(
        num_attempts=history.num_attempts,
        num_steps=sum(len(segment.steps) for segment in valid),
        num_void_steps=history.num_void_steps,
        num_trained=len(trained),
        num_pending=len(pending),
        num_returned=sum(segment.num_returned for segment in valid),
        oldest_age=max((segment.oldest_age for segment in valid if segment.oldest_age is not None), default=None),
        skipped=tuple(ordinal for ordinal in history.passed() if ordinal not in settled and ordinal not in pending),
        repeated=tuple(sorted(_repeated(trained, dropped))),
        dropped=dropped,
        problems=(*history.problems, *_step_problems(valid)),
    )


class _History:
    """Segments that count, in order; a restart takes away those after the save it resumed from."""

    def __init__(self) -> None:
        self.valid: list[Segment] = []
        self.problems: list[str] = []
        self.num_attempts = 0
        self.num_void_steps = 0
        self._last_start: RunStart | None = None
        self._handed_out: set[int] = set()  # by the last run
        self._first_known = 0

    def append(self, segment: Segment) -> None:
        if segment.start is not None:
            self._restart(segment.start)
        self._handed_out.update(segment.handed_out)
        self.valid.append(segment)

    @property
    def handed_out_by_last_run(self) -> set[int]:
        held = () if self._last_start is None else self._last_start.held
        return self._handed_out.union(ordinal for ordinal in held if ordinal >= 0)

    def passed(self) -> Iterator[int]:
        """Every prompt that the last run's stream has left behind. Rows that drop_last leaves are none of its."""
        start = self._last_start
        if start is None:
            return
        for ordinal in range(self._first_known, max([start.cut, *(last + 1 for last in self._handed_out)])):
            if ordinal % start.num_rows < start.num_served:
                yield ordinal

    def _restart(self, start: RunStart) -> None:
        resumed_from = [place for place, one in enumerate(self.valid) if one.saved_step == start.start_step]
        if not resumed_from and start.start_step > 0:
            self.problems.append(
                f"run {start.attempt} resumed from step {start.start_step}, of which the ledger knows no save: prompts "
                f"before {start.cut} cannot be proved"
            )
            self._first_known = start.cut
        if start.unaligned_because is not None and start.start_step > 0:
            self.problems.append(f"run {start.attempt} resumed without data alignment: {start.unaligned_because}")
        keep = resumed_from[-1] + 1 if resumed_from else 0
        self.num_void_steps += sum(len(segment.steps) for segment in self.valid[keep:])
        del self.valid[keep:]
        self.num_attempts += 1
        self._last_start = start
        self._handed_out = set()


def _dropped(segments: Sequence[Segment]) -> Iterator[tuple[str, tuple[int, ...]]]:
    everything = [one for segment in segments for one in segment.dropped]
    for reason in sorted({one.reason for one in everything}):
        yield reason, tuple(sorted(one.ordinal for one in everything if one.reason == reason))


def _repeated(trained: Sequence[int], dropped: Mapping[str, Sequence[int]]) -> set[int]:
    twice = {ordinal for ordinal, count in Counter(trained).items() if count > 1}
    return twice | set(trained).intersection(ordinal for ordinals in dropped.values() for ordinal in ordinals)


def _step_problems(segments: Sequence[Segment]) -> Iterator[str]:
    steps = [step for segment in segments for step in segment.steps]
    for before, after in pairwise(steps):
        if after != before + 1:
            yield f"step {after} was trained after step {before}"


def format_verdict(verdict: Verdict) -> str:
    """For people; the last line is the verdict."""
    lines = [
        f"steps          {verdict.num_steps} in {verdict.num_attempts} runs, {verdict.num_void_steps} thrown away by restarts",
        f"trained once   {verdict.num_trained - len(verdict.repeated)} prompts, oldest age {verdict.oldest_age}",
        f"pending        {verdict.num_pending}",
        f"returned       {verdict.num_returned} times a prompt went back to the stream",
    ]
    for reason, ordinals in verdict.dropped.items():
        lines.append(f"dropped        {len(ordinals)} {reason}: {_listed(ordinals)}")
    lines.append(f"skipped        {len(verdict.skipped)} {_listed(verdict.skipped)}".rstrip())
    lines.append(f"repeated       {len(verdict.repeated)} {_listed(verdict.repeated)}".rstrip())
    lines += [f"problem        {problem}" for problem in verdict.problems]
    lines.append("exactly once: yes" if verdict.exit_code == 0 else "exactly once: NO")
    return "\n".join(lines)


def _listed(ordinals: Sequence[int]) -> str:
    ranges: Ranges = to_ranges(ordinals)
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
