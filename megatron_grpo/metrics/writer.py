"""Where metrics go: `metrics.jsonl` always, TensorBoard and wandb when asked for. One record per step."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from ..errors import ConfigError
from .step import StepMetrics


class Sink(Protocol):
    def write(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes every record to each sink; a context manager. Records come in increasing `num_finished_steps`.

    `start_step` is the step a run starts at. A resumed run keeps the records up to it, and drops later ones (of steps
    that were lost with the crash and run again) and a torn last line; a new run moves an older file aside.
    """

    def __init__(
        self,
        log_dir: str | Path,
        *,
        start_step: int = 0,
        tensorboard: bool = True,
        wandb: Mapping[str, Any] | None = None,
    ):
        self.log_dir = Path(log_dir)
        # wandb first: a missing package is refused before any file of an earlier run is touched.
        self._sinks: list[Sink] = [] if wandb is None else [WandbSink(self.log_dir, wandb)]
        _make(self.log_dir)
        self._sinks.append(JsonLinesSink(self.log_dir / "metrics.jsonl", start_step=start_step))
        if tensorboard:
            self._sinks.append(TensorBoardSink(self.log_dir / "tensorboard", start_step=start_step))

    def write(self, metrics: StepMetrics) -> None:
        for sink in self._sinks:
            sink.write(metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLinesSink:
    """One JSON object per line: `step`, the metrics by name, and `dropped` where prompts were given up: a list of
    {"ordinal", "reason"}. Strict JSON: NaN and infinities are null.
    """

    def __init__(self, path: Path, *, start_step: int):
        if path.exists() and start_step:
            _drop_records_after(path, start_step)
        elif path.exists():
            path.replace(_free_name(path))
        self._file = path.open("a")

    def write(self, metrics: StepMetrics) -> None:
        record: dict[str, Any] = {"step": metrics.num_finished_steps}
        record |= {name: _json_number(value) for name, value in metrics.values.items()}
        if metrics.dropped:
            record["dropped"] = [asdict(prompt) for prompt in metrics.dropped]
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars through TensorBoard's own event writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path, *, start_step: int):
        # Imported here: a quarter of a second that runs without TensorBoard and `check` do not pay.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        # A session start tells TensorBoard to forget what earlier event files say about this and later steps.
        purge_from = start_step + 1 if start_step else 0
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=purge_from, session_log=session))

    def write(self, metrics: StepMetrics) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.values.items()]
        step = metrics.num_finished_steps
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; `settings` is the recipe's `logger.wandb` block (project, name)."""

    def __init__(self, log_dir: Path, settings: Mapping[str, Any]):
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "logger.wandb_enabled is true, but the package wandb is not installed: "
                "`pip install 'megatron_grpo[wandb]'`, or set logger.wandb_enabled=false"
            ) from error
        log_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=settings.get("project"), name=settings.get("name"), dir=str(log_dir))

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(dict(metrics.values), step=metrics.num_finished_steps)

    def close(self) -> None:
        self._run.finish()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"logger.log_dir: {folder} cannot be written ({error.strerror}); name another") from error


def _json_number(value: float) -> float | int | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number


def _drop_records_after(path: Path, last_step: int) -> None:
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the write that a kill interrupted
            continue
        if record["step"] <= last_step:
            kept.append(line)
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(kept))
    beside.replace(path)


def _free_name(path: Path) -> Path:
    """`metrics.jsonl` -> the first of `metrics.1.jsonl`, `metrics.2.jsonl`, ... that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
