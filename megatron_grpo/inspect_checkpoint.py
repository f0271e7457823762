"""`megatron-grpo inspect CHECKPOINT`: what a checkpoint holds, without starting anything. Changes nothing."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .checkpoint.contents import STREAM_STATE_NAME
from .checkpoint.directory import CheckpointDirectory
from .checkpoint.manifest import MANIFEST_NAME, REPLAY_BUFFER_NAME, Manifest
from .data.stream_state import StreamState, stream_state_from_json
from .errors import CheckpointError
from .replay.storage import SavedBuffer, load_buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSummary:
    num_groups: int
    num_trajectories: int
    num_generated_tokens: int
    groups_of_step: Mapping[int, int]
    groups_of_version: Mapping[int, int]
    mean_reward: float | None
    last_sampled: int
    max_size: int
    has_ordinals: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """`buffer`, `stream` None: the checkpoint has none."""

    path: str
    step: int
    num_files: int
    num_bytes: int
    metrics: Mapping[str, float | None]
    buffer: BufferSummary | None
    stream: StreamState | None


def inspect(path: Path) -> CheckpointSummary:
    """`path`: a checkpoint, or a directory of checkpoints, of which the latest is shown.

    Raises CheckpointError naming everything that is wrong with it.
    """
    checkpoint = _checkpoint(path)
    manifest = CheckpointDirectory(checkpoint.parent).verify(checkpoint)
    return CheckpointSummary(
        path=str(checkpoint),
        step=manifest.step,
        num_files=len(manifest.files),
        num_bytes=sum(entry.size for entry in manifest.files.values()),
        metrics=manifest.metrics,
        buffer=_buffer(checkpoint, manifest),
        stream=_stream(checkpoint, manifest),
    )


def run_inspect(path: Path, *, as_json: bool = False) -> int:
    summary = inspect(path)
    sys.stdout.write(f"{json.dumps(asdict(summary)) if as_json else format_summary(summary)}\n")
    return 0


def summarize_buffer(buffer: SavedBuffer) -> BufferSummary:
    rows = [row for group in buffer.groups for row in group.trajectories]
    rewards = [row.reward for row in rows if row.masked_because is None]
    return BufferSummary(
        num_groups=len(buffer.groups),
        num_trajectories=len(rows),
        num_generated_tokens=sum(row.num_generated for row in rows),
        groups_of_step=_counted([group.target_step for group in buffer.groups]),
        groups_of_version=_counted([group.generation_version for group in buffer.groups]),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        last_sampled=buffer.last_sampled,
        max_size=buffer.max_size,
        has_ordinals=buffer.has_ordinals,
    )


def format_summary(summary: CheckpointSummary) -> str:
    metrics = ", ".join(f"{name} {value}" for name, value in summary.metrics.items()) or "none"
    lines = [
        f"checkpoint  {summary.path}",
        f"step        {summary.step} finished steps; every file is as it was written",
        f"files       {summary.num_files}, {summary.num_bytes / 1e6:.1f} MB",
        f"metrics     {metrics}",
    ]
    lines += (
        ["buffer      none: a resumed run starts with an empty one"]
        if summary.buffer is None
        else _buffer_lines(summary.buffer)
    )
    lines += ["prompts     no state of a prompt stream"] if summary.stream is None else _stream_lines(summary.stream)
    return "\n".join(lines)


def _checkpoint(path: Path) -> Path:
    if (path / MANIFEST_NAME).is_file() or not path.is_dir():
        return path
    latest = CheckpointDirectory(path).latest()
    if latest is None:
        raise CheckpointError(f"{path} is no checkpoint ({MANIFEST_NAME} is missing) and holds none")
    return CheckpointDirectory(path).path(latest)


def _buffer(checkpoint: Path, manifest: Manifest) -> BufferSummary | None:
    if REPLAY_BUFFER_NAME not in manifest.files:
        return None
    return summarize_buffer(load_buffer(checkpoint / REPLAY_BUFFER_NAME))


def _stream(checkpoint: Path, manifest: Manifest) -> StreamState | None:
    if STREAM_STATE_NAME not in manifest.files:
        return None
    path = checkpoint / STREAM_STATE_NAME
    return stream_state_from_json(path.read_text(), str(path))


def _counted(values: Sequence[int]) -> Mapping[int, int]:
    return dict(sorted(Counter(values).items()))


def _buffer_lines(buffer: BufferSummary) -> list[str]:
    reward = "none" if buffer.mean_reward is None else f"{buffer.mean_reward:.3f}"
    contents = f"{buffer.num_trajectories} trajectories, {buffer.num_generated_tokens} generated tokens"
    lines = [
        f"buffer      {buffer.num_groups} groups ({contents}), mean reward {reward}, capacity {buffer.max_size}",
        f"            by step {_listed(buffer.groups_of_step)}; by weight version {_listed(buffer.groups_of_version)}",
        f"            the last sampled step is {buffer.last_sampled}",
    ]
    return lines if buffer.has_ordinals else [*lines, "            it has no ordinals"]


def _stream_lines(stream: StreamState) -> list[str]:
    order = stream.order
    lines = [f"prompts     {order.num_rows} rows, {order.num_served} an epoch; the next new one is {stream.cursor}"]
    if stream.frontier is None:
        why = stream.unaligned_because or "the checkpoint has no data frontier"
        return [*lines, f"            not aligned: {why}"]
    frontier = stream.frontier
    settled = len(frontier.trained_above_cut) + len(frontier.dropped_above_cut)
    return [
        *lines,
        f"            a resumed run goes on at {frontier.cut}; trained up to {frontier.frontier}, {settled} settled between",
    ]


def _listed(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{value}: {count}" for value, count in counts.items()) or "none"
