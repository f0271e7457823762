"""`replay_buffer.pt`: the groups of a buffer as a file that holds tensors, lists, dicts, strings and numbers only.

It loads with `torch.load(weights_only=True)`: opening a file from elsewhere never runs its code. What a resumed run
may use of it is decided by `restore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..types import TrajectoryGroup
from .columns import check_columns, check_lengths, from_columns, to_columns

FORMAT_VERSION = 1
_KEYS = (
    "format_version",
    "trajectories",
    "trajectory_versions",
    "target_weight_versions",
    "ordinals",
    "last_target_weight_already_generated",
    "max_size",
)
_PER_GROUP = ("trajectory_versions", "target_weight_versions", "ordinals")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBuffer:
    """What the file holds. `max_size` is the capacity at the save; the capacity of the current recipe wins.

    `has_ordinals` False: the run had no frontier accounting. Its groups then carry the ordinals -1, -2, ...: unique,
    and of no prompt of the stream.
    """

    groups: tuple[TrajectoryGroup, ...]
    last_sampled: int
    max_size: int
    has_ordinals: bool = True


def save_buffer(path: Path, buffer: SavedBuffer) -> None:
    """Raises CheckpointError for a group that the file cannot hold (names it), OSError where the disk refuses."""
    try:
        columns = to_columns(buffer.groups)
    except TypeError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. An environment's metadata must consist of dicts, lists, tuples, "
            "strings, numbers, booleans and None"
        ) from error
    record = {
        "format_version": FORMAT_VERSION,
        "trajectories": columns,
        "trajectory_versions": [group.generation_version for group in buffer.groups],
        "target_weight_versions": [group.target_step for group in buffer.groups],
        "last_target_weight_already_generated": buffer.last_sampled,
        "max_size": buffer.max_size,
    }
    if buffer.has_ordinals:
        record["ordinals"] = [group.ordinal for group in buffer.groups]
    # Given a path, torch reports a full disk as a RuntimeError about its own stream.
    with path.open("wb") as file, _without_checksums():
        torch.save(record, file)


def load_buffer(path: Path) -> SavedBuffer:
    """Raises CheckpointError, naming the file and what is wrong with it, for anything that `save_buffer` did not write.

    Only `ordinals` may be absent: see `data.stream_state` for when that is right.
    """
    record = _read(path)
    _refuse(path, _wrong_keys(record))
    _refuse(path, check_columns(record["trajectories"]))
    has_ordinals = "ordinals" in record
    num_groups = len(record["trajectories"]["group_sizes"])
    ordinals = record.get("ordinals", list(range(-1, -1 - num_groups, -1)))
    _refuse(path, _wrong_lengths(record, ordinals))
    _refuse(path, check_lengths(record["trajectories"]))
    try:
        groups = from_columns(
            record["trajectories"],
            ordinals=ordinals,
            versions=record["trajectory_versions"],
            targets=record["target_weight_versions"],
        )
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return SavedBuffer(
        groups=groups,
        last_sampled=record["last_target_weight_already_generated"],
        max_size=record["max_size"],
        has_ordinals=has_ordinals,
    )


@contextmanager
def _without_checksums() -> Iterator[None]:
    """The checkpoint's manifest has a digest of the whole file; torch's own per tensor would double its cost."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes): its write was cut off, or the disk was full")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a foreign file makes the reader raise is not ours to list
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} is truncated, foreign, or holds objects that are never loaded (only tensors, lists, dicts, "
            f"strings and numbers are): {type(error).__name__}: {reason[0]}"
        ) from error


def _wrong_keys(record: Any) -> Iterator[str]:
    if not isinstance(record, dict):
        yield f"it holds a {type(record).__name__}, not a replay buffer"
        return
    if "format_version" in record and record["format_version"] != FORMAT_VERSION:
        yield f"format version {record['format_version']!r}; this release reads version {FORMAT_VERSION}"
        return
    yield from (f"the key {key} is missing" for key in _KEYS if key not in record and key != "ordinals")
    yield from (f"the key {key!r} is unknown" for key in record if key not in _KEYS)
    for key in ("last_target_weight_already_generated", "max_size"):
        if not _is_integer(record.get(key, 0)):
            yield f"{key} is not a whole number"
    for key in _PER_GROUP:
        values = record.get(key, [])
        if not isinstance(values, list) or not all(map(_is_integer, values)):
            yield f"{key} is not a list of whole numbers"


def _wrong_lengths(record: dict[str, Any], ordinals: Sequence[int]) -> Iterator[str]:
    lengths = {"trajectories": len(record["trajectories"]["group_sizes"])}
    lengths |= {key: len(record[key]) for key in _PER_GROUP if key in record}
    if len(set(lengths.values())) > 1:
        yield "its lists differ in length: " + ", ".join(f"{key} {length}" for key, length in lengths.items())
    elif len(set(ordinals)) < len(ordinals):
        yield f"prompt {max(ordinals, key=ordinals.count)} is in it twice"


def _refuse(path: Path, problems: Iterator[str]) -> None:
    if found := list(problems):
        raise CheckpointError(f"{path} is damaged or foreign: {'; '.join(found)}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
