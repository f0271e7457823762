"""One run per checkpoint directory. The kernel drops the lock with its process, so a killed run leaves none."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError
from .files import what_to_do

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def run_lock(root: Path, setting: str = "checkpointing.checkpoint_dir") -> Iterator[None]:
    """Hold `root` (created if missing) for this process. Raises CheckpointError naming who holds it, and the recipe key
    `setting` that chooses another directory."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(f"no run can start in {root}: {what_to_do(error, root)}") from error
    try:
        _take(descriptor, root, setting)
        yield
    finally:
        os.close(descriptor)  # the file stays: removing it would let two runs lock two files of one name


def _take(descriptor: int, root: Path, setting: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"another run uses {root}: {_holder(descriptor)}. Two runs would overwrite each other: wait for it, end "
            f"it, or set {setting} to another directory"
        ) from None
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        log.warning("the file system of %s cannot lock (%s): make sure that no second run uses it", root, error)
    record = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {record['pid']} on host {record['host']}, since {record['since']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has just started"
