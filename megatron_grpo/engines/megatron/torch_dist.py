"""One rank's part of Megatron's `torch_dist` checkpoints: planned and copied, written by a thread, completed.

The format and the plan are Megatron's. Its ways to run the writing are not used: both start a process that serves a
result queue (9 s at the first save of a process), and the asynchronous one forks, which is unsafe beside the threads of
Ray, gloo and an engine. Knows nothing of policies, and agrees on nothing: a failure is raised where it happens.

| step                  | thread | collective | reads live weights | files                                  |
|-----------------------|--------|------------|--------------------|----------------------------------------|
| `stage`               | caller | yes        | yes                | none                                   |
| `StagedSave.write`    | any    | no         | no                 | `__RANK_0.distcp`, fsynced             |
| `StagedSave.complete` | caller | no: rank 0 | no                 | `.metadata`, `metadata.json`, fsynced  |
| `check_files`, `read` | caller | no         | writes them        | none                                   |
"""

from __future__ import annotations

import io
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from ...errors import CheckpointError

MARKER = "metadata.json"  # its presence makes a directory a checkpoint for Megatron


class StagedSave:
    """A planned save whose data nobody else changes: copies in host memory."""

    def __init__(
        self, path: Path, writer: FileSystemWriterAsync, metadata: Metadata | None, buckets: Sequence[WriteBucket]
    ):
        self._path = path
        self._writer = writer
        self._metadata = metadata
        self._buckets = buckets

    def write(self) -> list[WriteResult]:
        """Write this rank's files. Raises OSError with the file incomplete."""
        return [result for bucket in self._buckets for result in _write_file(bucket)]

    def complete(self, results: list[list[WriteResult]]) -> None:
        """On rank 0, with what every rank wrote: the index that makes the directory a checkpoint."""
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._path))
        for path in (self._path / MARKER, self._path):
            _fsync(path)


def stage(contents: ShardedStateDict, path: Path) -> StagedSave:
    """Plan the save of `contents` into the directory `path` and copy what this rank will write; collective."""
    live = {
        value.data.untyped_storage().data_ptr()
        for value in nested_values(contents)
        if isinstance(value, ShardedBase) and isinstance(value.data, torch.Tensor)
    }
    plan = _Plan()
    megatron_strategy._logged_mcore_async_deprecation = True  # a warning about its forked writer, which we do not use
    with _no_result_server():
        dist_checkpointing.save(contents, str(path), plan, async_sharded_save=True, async_strategy="mcore")
    return StagedSave(path, plan.writer, plan.metadata, [_copied(bucket, live) for bucket in plan.writer.write_buckets])


def check_files(path: Path) -> None:
    """Raises CheckpointError for a file that is missing or shorter than the index says; OSError, pickle errors."""
    needed: dict[str, int] = {}
    for item in FileSystemReader(path).read_metadata().storage_data.values():
        needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
    for name, size in needed.items():
        found = (path / name).stat().st_size
        if found < size:
            raise CheckpointError(f"{path / name} is truncated: {found} bytes of {size}")


def read_common(path: Path) -> dict[str, Any]:
    """What is the same on every rank: everything that was saved outside of tensors and sharded objects."""
    return dist_checkpointing.load_common_state_dict(str(path))


def read(places: ShardedStateDict, path: Path) -> dict[str, Any]:
    """The values for `places`; tensors are filled in place where their cut allows it.

    Raises what Megatron, torch and the file system raise: another shape, a missing key, an unreadable file.
    """
    return dist_checkpointing.load(places, str(path), validate_access_integrity=False)


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the point where it would hand the writing to a process."""

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy):
        self.writer: FileSystemWriterAsync = writer
        _, self.metadata, _ = save_state_dict_ret  # the metadata is rank 0's; None elsewhere
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


@contextmanager
def _no_result_server() -> Iterator[None]:
    """Inside, a writer that asks for the process-wide queue of results gets one without a server process."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _copied(bucket: WriteBucket, live: set[int]) -> WriteBucket:
    """`bucket` in host memory of its own. Megatron has already copied views; whole tensors still are the live ones."""
    file_path, key, (objects, tensors) = bucket
    own = [(item, tensor.to("cpu", copy=tensor.untyped_storage().data_ptr() in live)) for item, tensor in tensors]
    return file_path, key, (objects, own)


def _write_file(bucket: WriteBucket) -> list[WriteResult]:
    """Serialised in memory first: torch.save turns the error of a full disk into one about positions in the file.

    No views of the buffers: one that an exception's traceback keeps alive crashes CPython 3.12.1 when it is collected.
    """
    file_path, key, (objects, tensors) = bucket
    results = []
    with open(file_path, "wb") as file:
        for item, data in (*objects, *tensors):
            content, offset = _serialised(data).getvalue(), file.tell()
            file.write(content)
            info = _StorageInfo(relative_path=key, offset=offset, length=len(content))
            results.append(WriteResult(index=item.index, size_in_bytes=len(content), storage_data=info))
        file.flush()
        os.fsync(file.fileno())
    return results


def _serialised(data: torch.Tensor | io.BytesIO) -> io.BytesIO:
    if isinstance(data, io.BytesIO):
        return data
    memory = io.BytesIO()
    torch.save(data, memory)
    return memory


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
