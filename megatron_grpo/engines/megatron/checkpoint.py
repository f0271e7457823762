"""Saves and restores one rank of the policy, in any layout.

All methods are collective over the policy's world and run on the thread that makes its other collective calls; the
writing itself is a thread of this object, which does not communicate. One save at a time.

| call                       | waits for                 | afterwards                                                    |
|----------------------------|---------------------------|---------------------------------------------------------------|
| `begin_save`               | copies of the state       | training may go on; the directory is no checkpoint yet        |
| `finish(blocking=False)`   | the other ranks' call     | True: nothing is in flight, the save is complete and fsynced  |
| `finish(blocking=True)`    | the slowest writer        | the same, always True                                         |
| `load`                     | reads                     | the policy is what was saved; weights changed in place        |
| `close`                    | this rank's writer        | no thread is left; a save that was in flight is abandoned     |

A failure on any rank is raised as CheckpointError on every rank, naming the directory and what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from ...errors import CheckpointError
from . import torch_dist
from .checkpoint_contents import Header, contents_of, places_for, put_back

if TYPE_CHECKING:
    from .policy import MegatronPolicy

FULL_DISK = "free some space; earlier checkpoints are untouched"
REMEDIES = {
    errno.ENOSPC: FULL_DISK,
    errno.EDQUOT: FULL_DISK,
    errno.EFBIG: FULL_DISK,
    errno.ENOENT: "every rank must see the directory: put checkpointing.checkpoint_dir on storage all nodes share",
    errno.EROFS: "make the directory writable, or choose another checkpointing.checkpoint_dir",
    errno.EACCES: "make the directory accessible, or choose another checkpointing.checkpoint_dir",
}
ON_SAVE = "see the cause; earlier checkpoints are untouched"
ON_LOAD = "move this checkpoint away to resume from the one before it"


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    path: Path
    staged: torch_dist.StagedSave
    written: Future


class PolicyCheckpoint:
    """The checkpoints of `policy`, which must have joined its world. Starts no thread before the first save."""

    def __init__(self, policy: MegatronPolicy):
        self._policy = policy
        self._device = next(policy.module.parameters()).device
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._in_flight: _InFlight | None = None

    def save(self, path: str | Path) -> None:
        """Write a whole checkpoint into the existing directory `path`."""
        self.begin_save(path)
        self.finish(blocking=True)

    def begin_save(self, path: str | Path) -> None:
        """Copy the state and start writing it into the existing directory `path`."""
        assert self._in_flight is None, f"{self._in_flight.path} is still being written"
        path = Path(path)
        with self._together(f"cannot save into {path}", ON_SAVE):
            _refuse_unusable(path)
        staged = torch_dist.stage(contents_of(self._policy), path)
        self._in_flight = _InFlight(path=path, staged=staged, written=self._writer.submit(staged.write))

    def finish(self, *, blocking: bool) -> bool:
        """Complete the save in flight if every rank has written its part; True when none is in flight any more.

        After an error none is in flight either; the directory is incomplete.
        """
        save = self._in_flight
        if save is None:
            return True
        if not blocking and not self._all(save.written.done()):
            return False
        self._in_flight = None
        what = f"checkpoint {save.path} could not be written"
        results = []
        with self._together(what, ON_SAVE):
            results = save.written.result()
        of_ranks = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(results, of_ranks, dst=0)
        with self._together(what, ON_SAVE):
            if of_ranks is not None:
                save.staged.complete(of_ranks)
        return True

    def load(self, path: str | Path) -> None:
        """Make the policy what was saved in `path`, by whatever layout. After an error the policy is of no use.

        Random states return only to a world cut as the saving one. Rates, decay and betas stay those of the recipe;
        the schedule goes on where it stood.
        """
        assert self._in_flight is None, f"{self._in_flight.path} is still being written"
        path = Path(path)
        with self._together(f"cannot resume from {path}", ON_LOAD):
            torch_dist.check_files(path)
            header = Header.from_common(torch_dist.read_common(path))
            loaded = torch_dist.read(places_for(self._policy, header), path)
            put_back(self._policy, header, loaded)

    def close(self) -> None:
        """Not collective. Call `finish(blocking=True)` first, or lose the save in flight."""
        self._in_flight = None
        self._writer.shutdown(wait=True)

    @contextmanager
    def _together(self, what: str, remedy: str) -> Iterator[None]:
        """An error of the block, on any rank, becomes a CheckpointError on every rank. The block cannot communicate."""
        failure, text = None, None
        try:
            yield
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - handed on: every rank raises it
            failure, text = error, _explained(error, remedy)
        if self._all(failure is None):
            return
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        causes = dict.fromkeys(text for text in texts if text is not None)  # shared storage: mostly the same one
        ranks = [rank for rank, text in enumerate(texts) if text is not None]
        raise CheckpointError(f"{what}: {'; '.join(causes)} (rank {', '.join(map(str, ranks))})") from failure

    def _all(self, holds: bool) -> bool:
        missing = torch.tensor([not holds], dtype=torch.int32, device=self._device)
        dist.all_reduce(missing)
        return not missing.item()


def _refuse_unusable(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the directory does not exist", str(path))
    if (path / torch_dist.MARKER).exists():
        raise CheckpointError("it holds a checkpoint already; choose an empty directory")


def _explained(error: BaseException, remedy: str) -> str:
    """The cause in one line, and what to do about it."""
    if isinstance(error, CheckpointException):  # torch's, a BaseException around the errors of ranks
        error, _ = next(iter(error.failures.values()))
    known = _first_os_error(error)
    if known is not None:
        return f"{known}; {REMEDIES.get(known.errno, remedy)}"
    if isinstance(error, CheckpointError):
        return f"{error}; {remedy}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}; {remedy}"


def _first_os_error(error: BaseException | None) -> OSError | None:
    """torch wraps the system's errors."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
