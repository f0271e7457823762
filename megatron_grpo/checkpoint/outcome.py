"""`outcome.json`: how the last run in this directory ended, for the launcher that may start it again."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import CheckpointError
from .files import Files, what_to_do

OUTCOME_NAME = "outcome.json"
Ending = Literal["finished", "preempted", "deadline", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`step`: the finished steps; `requeue`: only a preemption notice (USR1) and the deadline ask for another start."""

    ending: Ending
    step: int
    requeue: bool
    reason: str = ""


def write_outcome(root: Path, outcome: Outcome, files: Files | None = None) -> None:
    """Replaces the file as a whole. Raises CheckpointError where it cannot be written."""
    files = files or Files()
    assert outcome.ending in get_args(Ending), outcome
    record = asdict(outcome) | {"time": time.strftime("%Y-%m-%d %H:%M:%S")}
    partial = root / f"{OUTCOME_NAME}.{os.getpid()}.tmp"
    try:
        files.write(partial, (json.dumps(record) + "\n").encode())
        files.sync(partial)
        files.rename(partial, root / OUTCOME_NAME)
        files.sync(root)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"the outcome of the run cannot be recorded: {what_to_do(error, root)}") from error


def read_outcome(root: Path) -> Outcome | None:
    """None: no run ended here, or the last one was killed."""
    path = root / OUTCOME_NAME
    try:
        record = json.loads(path.read_text())
        return Outcome(ending=record["ending"], step=record["step"], requeue=record["requeue"], reason=record["reason"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}): remove it") from error


def clear_outcome(root: Path) -> None:
    """A run begins: until it ends by itself, there is no outcome."""
    (root / OUTCOME_NAME).unlink(missing_ok=True)
