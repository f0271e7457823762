"""What a run achieved, told once at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..types import ValidationResult
from .progress import format_seconds


def reward_window(num_steps: int) -> int:
    """Steps of a running mean: a tenth of the run, at least one."""
    return max(1, num_steps // 10)


def mean_or_nan(values: Sequence[float]) -> float:
    """A step whose rewards were all masked has a NaN reward and does not count."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """`exact_before` is None when at most one validation ran, `exact_after` when none did; shares in [0, 1]."""

    num_finished_steps: int
    num_steps: int
    window: int
    reward_first: float
    reward_last: float
    exact_before: float | None
    exact_after: float | None
    num_held_out: int
    seconds_by_cause: Mapping[str, float]
    files: Mapping[str, str]


@dataclass(kw_only=True, slots=True)
class RunHistory:
    """Collects during a run what its summary needs."""

    num_steps: int
    start_step: int = 0
    rewards: list[float] = field(default_factory=list)
    validations: list[ValidationResult] = field(default_factory=list)
    seconds_by_cause: dict[str, float] = field(default_factory=dict)

    def spent(self, seconds: Mapping[str, float]) -> None:
        for cause, value in seconds.items():
            self.seconds_by_cause[cause] = self.seconds_by_cause.get(cause, 0.0) + value

    def running_reward(self) -> float:
        return mean_or_nan(self.rewards[-reward_window(self.num_steps) :])

    def summary(self, files: Mapping[str, str]) -> Summary:
        window = reward_window(len(self.rewards))
        exact = [result.accuracy for result in self.validations]
        return Summary(
            num_finished_steps=self.start_step + len(self.rewards),
            num_steps=self.num_steps,
            window=window,
            reward_first=mean_or_nan(self.rewards[:window]),
            reward_last=mean_or_nan(self.rewards[-window:]),
            exact_before=exact[0] if len(exact) > 1 else None,
            exact_after=exact[-1] if exact else None,
            num_held_out=self.validations[-1].num_samples if self.validations else 0,
            seconds_by_cause=dict(self.seconds_by_cause),
            files=dict(files),
        )


def format_summary(summary: Summary) -> str:
    total_s = sum(summary.seconds_by_cause.values())
    lines = [
        f"Finished {summary.num_finished_steps} of {summary.num_steps} steps in {format_seconds(total_s)}",
        _row("reward", _reward(summary)),
        _row("held-out exact", _exact(summary)),
    ]
    lines += _time_rows(summary.seconds_by_cause, total_s)
    lines += [_row(label, path) for label, path in summary.files.items()]
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"  {label:<20} {text}".rstrip()


def _reward(summary: Summary) -> str:
    if math.isnan(summary.reward_first) or math.isnan(summary.reward_last):
        return "none measured"
    which = "the first and last step" if summary.window == 1 else f"means of the first and last {summary.window} steps"
    return f"{summary.reward_first:.3f} -> {summary.reward_last:.3f}  ({which})"


def _exact(summary: Summary) -> str:
    if summary.exact_after is None:
        return "not measured"
    after = f"{summary.exact_after:.1%} of {summary.num_held_out}"
    return after if summary.exact_before is None else f"{summary.exact_before:.1%} -> {after}"


def _time_rows(seconds_by_cause: Mapping[str, float], total_s: float) -> list[str]:
    ordered = sorted(seconds_by_cause.items(), key=lambda item: -item[1])
    return [_row(f"time {cause.replace('_', ' ')}"[:20], f"{s:8.1f} s  {s / total_s:6.1%}") for cause, s in ordered if s]
