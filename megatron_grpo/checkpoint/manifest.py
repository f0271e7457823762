"""`manifest.json`: which files a checkpoint consists of, with sizes and digests. Read before anything is loaded."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CheckpointError
from .files import Files

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
REPLAY_BUFFER_NAME = "replay_buffer.pt"  # the one file that a resumed run can do without
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`files` by path relative to the checkpoint; `metrics` (null: not finite) decide which checkpoints are kept."""

    step: int
    files: Mapping[str, FileEntry]
    metrics: Mapping[str, float | None]

    def to_json(self) -> str:
        metrics = {
            name: value if value is not None and math.isfinite(value) else None for name, value in self.metrics.items()
        }
        files = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        record = {"format_version": FORMAT_VERSION, "step": self.step, "digest": "crc32", "metrics": metrics}
        return json.dumps(record | {"files": files}, indent=1, allow_nan=False) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises CheckpointError: no manifest, not ours, or of an unknown format version."""
    path = checkpoint / MANIFEST_NAME
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is not a whole checkpoint: {MANIFEST_NAME} is missing") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}; this release reads version {FORMAT_VERSION}: use the release that "
            "wrote it"
        )
    try:
        files = {name: FileEntry(**entry) for name, entry in record["files"].items()}
        return Manifest(step=record["step"], files=files, metrics=record["metrics"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def describe_files(checkpoint: Path, files: Files, *, num_threads: int, sync: bool) -> dict[str, FileEntry]:
    """Size and digest of every file; with `sync` each is on the disk afterwards, which overlaps with the digests."""
    paths = list(files_of(checkpoint))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as pool:
        synced = [pool.submit(files.sync, path) for path in paths if sync]
        digests = list(pool.map(files.digest, paths))
        for done in synced:
            done.result()
    return {
        path.relative_to(checkpoint).as_posix(): FileEntry(size=path.stat().st_size, digest=digest)
        for path, digest in zip(paths, digests, strict=True)
    }


def files_of(checkpoint: Path) -> Iterable[Path]:
    """Every file but the manifest, sorted. NFS keeps a deleted file that is still open under a `.nfs` name."""
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name != MANIFEST_NAME and not path.name.startswith(".nfs"):
            yield path


def verify_checkpoint(checkpoint: Path, files: Files, *, num_threads: int, digests: bool = True) -> Manifest:
    """Compare the directory with its manifest; `digests=False` compares names and sizes only, without reading.

    Raises CheckpointError naming every file that is missing, extra, truncated or changed. A missing
    `replay_buffer.pt` is a warning; the returned manifest then does not list it.
    """
    manifest = read_manifest(checkpoint)
    found = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files_of(checkpoint)}
    problems = [f"{name} is missing" for name in manifest.files if name not in found and name != REPLAY_BUFFER_NAME]
    problems += [f"{name} is not part of it" for name in found if name not in manifest.files]
    common = [name for name in manifest.files if name in found]
    problems += [
        f"{name} has {found[name]} bytes instead of {manifest.files[name].size}"
        for name in common
        if found[name] != manifest.files[name].size
    ]
    if digests and not problems:
        problems += _changed(checkpoint, manifest, common, files, num_threads)
    if problems:
        raise CheckpointError(
            f"{checkpoint} is damaged: {'; '.join(problems)}. Restore the files, or move the directory away to resume "
            "from an earlier checkpoint"
        )
    if REPLAY_BUFFER_NAME in manifest.files and REPLAY_BUFFER_NAME not in found:
        log.warning("%s has no %s: the buffer starts empty", checkpoint, REPLAY_BUFFER_NAME)
    return Manifest(step=manifest.step, files={name: manifest.files[name] for name in common}, metrics=manifest.metrics)


def _changed(checkpoint: Path, manifest: Manifest, names: list[str], files: Files, num_threads: int) -> list[str]:
    with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as pool:
        digests = pool.map(files.digest, [checkpoint / name for name in names])
        return [
            f"{name} has changed"
            for name, digest in zip(names, digests, strict=True)
            if digest != manifest.files[name].digest
        ]
