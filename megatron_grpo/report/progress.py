"""The running display: a live block on a terminal, one plain line per step elsewhere. Both show the same facts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from .console import say


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What a reader wants to know after each step. `reward` is a running mean, `age` the step's mean age."""

    num_finished_steps: int
    num_steps: int
    reward: float
    loss: float
    age: float
    tokens_per_s: float
    waited_s: float
    left_s: float


class Display(Protocol):
    """Shows a run while it lasts; a context manager."""

    def phase(self, text: str) -> None:
        """What the run is busy with until the next phase or step, for the minutes in which no step ends."""
        ...

    def step(self, facts: StepFacts) -> None: ...

    def note(self, text: str) -> None:
        """One line that stays on the screen."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_details: object) -> None: ...


def open_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_interactive else LineDisplay(console)


def format_step(facts: StepFacts) -> str:
    width = len(str(facts.num_steps))
    return f"step {facts.num_finished_steps:>{width}}/{facts.num_steps}  {format_facts(facts)}"


def format_facts(facts: StepFacts) -> str:
    return (
        f"reward {format_number(facts.reward, '.3f')}  loss {format_number(facts.loss, '+.4f')}  "
        f"age {format_number(facts.age, '.2f')}  {format_number(facts.tokens_per_s, ',.0f')} tok/s  "
        f"waited {format_seconds(facts.waited_s)}  left {format_seconds(facts.left_s)}"
    )


def format_number(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "-"


def format_seconds(seconds: float) -> str:
    """`0.3 s`, `42 s`, `2m05s`, `3h07m`, `2d04h`; `-` when unknown."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


class LineDisplay:
    """For files and pipes: every event is one line, written when it happens."""

    def __init__(self, console: Console):
        self._console = console

    def phase(self, text: str) -> None:
        say(self._console, text)

    def step(self, facts: StepFacts) -> None:
        say(self._console, format_step(facts))

    def note(self, text: str) -> None:
        say(self._console, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_details: object) -> None:
        pass


class LiveDisplay:
    """For terminals: notes and log records scroll by above a block that is redrawn four times a second.

    Rich redirects stdout and stderr while the block is shown, so that what other libraries print does not tear it.
    The redrawing thread only reads `_facts` and `_phase`, each replaced whole.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic):
        self._console = console
        self._now = now
        self._facts: StepFacts | None = None
        self._phase = ("starting", now())
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def phase(self, text: str) -> None:
        self._phase = (text, self._now())

    def step(self, facts: StepFacts) -> None:
        self._facts = facts
        self._phase = ("since the last step", self._now())

    def note(self, text: str) -> None:
        say(self._console, text)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc_details: object) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        text, since = self._phase
        status = Text(f"{text}: {format_seconds(self._now() - since)}", style="dim")
        facts = self._facts
        if facts is None:
            return status
        bar = ProgressBar(total=facts.num_steps, completed=facts.num_finished_steps, width=40)
        return Group(Padding(bar), Text(format_step(facts)), status)  # a bare bar does not end its line
