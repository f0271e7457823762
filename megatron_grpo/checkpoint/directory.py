"""`checkpoint_dir/step_N`: written beside, synced, renamed, so that a checkpoint is there whole or not at all.

    tmp_step_N     a save under way, or what a killed one left: never looked at, removed at the next start
    step_N         complete: its manifest was written last, and the rename made it visible
    tmp_old_step_N on its way out: renamed first, so that a half-removed directory is never taken for a checkpoint

One process owns the directory (`lock`); worker processes only write files into `tmp_step_N`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError
from .files import Files, what_to_do
from .manifest import MANIFEST_NAME, Manifest, describe_files, read_manifest, verify_checkpoint
from .retention import Retention, SavedStep

log = logging.getLogger(__name__)

_STEP = re.compile(r"step_(0|[1-9]\d*)")
_LEFT_OVER = re.compile(r"tmp_(old_)?step_\d+")


class CheckpointDirectory:
    """All checkpoints of a run. `files` is the seam for tests that stop between two operations."""

    def __init__(self, root: Path | str, *, files: Files | None = None, num_threads: int = 4):
        self.root = Path(root)
        self._files = files or Files()
        self._num_threads = num_threads

    def path(self, step: int) -> Path:
        return self.root / f"step_{step}"

    def prepare(self) -> None:
        """At the start of a run, under its lock: create the directory, remove what killed saves left."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.root.iterdir()):
                if path.is_dir() and _LEFT_OVER.fullmatch(path.name):
                    log.warning("removing %s, which a save that was cut off left behind", path)
                    self._files.remove_tree(path)
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be used: {what_to_do(error, self.root)}") from error

    # What is there

    def steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, ascending by number."""
        return tuple(sorted(step for step, path in self._candidates() if (path / MANIFEST_NAME).is_file()))

    def latest(self) -> int | None:
        """The highest step of a complete checkpoint; None: there is none.

        An empty directory above it is skipped with a warning. One that holds files but no manifest was damaged after
        it was written: CheckpointError, since resuming from an older step is the user's decision.
        """
        latest = max(self.steps(), default=None)
        for step, path in sorted(self._candidates()):
            if (latest is None or step > latest) and not (path / MANIFEST_NAME).is_file():
                if any(path.iterdir()):
                    older = "start afresh" if latest is None else f"resume from step_{latest}"
                    raise CheckpointError(
                        f"{path} holds files but no {MANIFEST_NAME}: it is damaged, or not ours; move it away to {older}"
                    )
                log.warning("%s is empty and is not taken for a checkpoint", path)
        return latest

    def verify(self, path: Path, *, digests: bool = True) -> Manifest:
        """See `manifest.verify_checkpoint`: raises CheckpointError naming what is wrong."""
        manifest = verify_checkpoint(path, self._files, num_threads=self._num_threads, digests=digests)
        named = _STEP.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{path} holds the checkpoint of step {manifest.step}: give it back its own name")
        return manifest

    # Saving

    @contextmanager
    def writing(self, step: int, metrics: Mapping[str, float | None] | None = None) -> Iterator[Path]:
        """Write the files of checkpoint `step` into the yielded directory; it becomes `step_N` when the block ends.

        Whatever fails, earlier checkpoints are untouched and nothing half-written stays visible. An OSError becomes a
        CheckpointError that says what to do; other errors pass unchanged.
        """
        path = self.begin(step)
        try:
            with self._explaining(step):
                yield path
            self.commit(step, metrics)
        except BaseException:
            self.abandon(step)
            raise

    def begin(self, step: int) -> Path:
        """The first half of `writing`, for a save that goes on in the background: an empty `tmp_step_N`.

        Raises CheckpointError when `step_N` exists already, or nothing can be written.
        """
        if self._temporary(step).exists():  # abandoned, and could not be removed then
            self.abandon(step)
        with self._explaining(step):
            self._make_room(step)
            self._files.make_directory(self._temporary(step))
        return self._temporary(step)

    def commit(self, step: int, metrics: Mapping[str, float | None] | None = None) -> Path:
        """The second half: every file is written. Returns `step_N`, which will survive a power cut."""
        path, files = self._temporary(step), self._files
        with self._explaining(step):
            entries = describe_files(path, files, num_threads=self._num_threads, sync=True)
            manifest = Manifest(step=step, files=entries, metrics=dict(metrics or {}))
            files.write(path / MANIFEST_NAME, manifest.to_json().encode())
            files.sync(path / MANIFEST_NAME)
            for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
                files.sync(folder)
            files.sync(path)
            files.rename(path, self.path(step))
            files.sync(self.root)
        log.info("checkpoint %s is complete (%d files)", self.path(step), len(entries))
        return self.path(step)

    def abandon(self, step: int) -> None:
        """Give a begun save up. What cannot be removed now is removed at the next start."""
        if not self._temporary(step).exists():
            return
        try:
            self._files.remove_tree(self._temporary(step))
        except OSError as error:
            log.warning("%s is left behind: %s", self._temporary(step), error)

    def retain(self, retention: Retention) -> tuple[int, ...]:
        """Remove the checkpoints that `retention` does not keep and return their steps. A refusal is logged only."""
        saved = [SavedStep(step=step, metric=self._metric(step, retention.metric_name)) for step in self.steps()]
        removed = sorted({one.step for one in saved} - retention.steps_to_keep(saved))
        for step in removed:
            leaving = self.root / f"tmp_old_step_{step}"
            try:
                self._files.rename(self.path(step), leaving)
                self._files.remove_tree(leaving)
            except OSError as error:
                log.warning("old checkpoint %s could not be removed: %s", self.path(step), error)
        return tuple(removed)

    # Inside

    def _temporary(self, step: int) -> Path:
        return self.root / f"tmp_step_{step}"

    def _candidates(self) -> Iterator[tuple[int, Path]]:
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if (match := _STEP.fullmatch(path.name)) and path.is_dir():
                yield int(match[1]), path

    def _metric(self, step: int, name: str | None) -> float | None:
        try:
            return None if name is None else read_manifest(self.path(step)).metrics.get(name)
        except CheckpointError as error:
            log.warning("%s", error)  # counts as the worst, which the newest of them outlives as the latest
            return None

    def _make_room(self, step: int) -> None:
        """Only a name that no checkpoint uses can be renamed to."""
        target = self.path(step)
        if not target.exists():
            return
        if (target / MANIFEST_NAME).is_file():
            raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten")
        if any(target.iterdir()):
            aside = next(
                name for n in range(1, 1000) if not (name := self.root / f"{target.name}.incomplete{n}").exists()
            )
            log.warning("%s is not a checkpoint; it becomes %s", target, aside)
            self._files.rename(target, aside)
        else:
            self._files.remove_tree(target)

    @contextmanager
    def _explaining(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            latest = max(self.steps(), default=None)
            earlier = "there is no earlier one" if latest is None else f"step_{latest} is intact"
            raise CheckpointError(
                f"checkpoint step_{step} was not written: {what_to_do(error, self.root)}; {earlier}"
            ) from error
