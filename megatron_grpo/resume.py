"""What a run finds in its checkpoint directory, checked against its recipe and data before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .checkpoint.contents import POLICY_NAME, STREAM_STATE_NAME, TrainingRecord, read_training_record
from .checkpoint.directory import CheckpointDirectory
from .checkpoint.manifest import REPLAY_BUFFER_NAME, Manifest
from .config.schema import Recipe
from .data.stream import PromptRow
from .data.stream_state import BufferFound, StreamState, check_same_rows, rows_digest, stream_state_from_json
from .errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """`buffer_path` None: the buffer starts empty, because of `without_buffer`."""

    step: int
    path: Path
    stream: StreamState
    buffer_path: Path | None
    without_buffer: BufferFound

    def buffer_found(self, *, has_ordinals: bool | None) -> BufferFound:
        """`has_ordinals` as the file says; None: it was not read."""
        if has_ordinals is None:
            return self.without_buffer
        return "with_ordinals" if has_ordinals else "without_ordinals"

    @property
    def policy_path(self) -> Path:
        return self.path / POLICY_NAME


def find_resume(recipe: Recipe, rows: Sequence[PromptRow], directory: CheckpointDirectory) -> Resume | None:
    """The latest checkpoint; None: there is none.

    Raises CheckpointError for a damaged one, ConfigError where recipe or data do not go on with it.
    """
    step = directory.latest()
    if step is None:
        return None
    path = directory.path(step)
    manifest = directory.verify(path)
    stream = _stream(path)
    check_same_rows(stream, num_rows=len(rows), digest=rows_digest(rows))
    buffer_path, without_buffer = _buffer(recipe, path, manifest)
    if buffer_path is not None:
        _refuse_mixed_groups(recipe, read_training_record(path), path)
    log.info("resuming from %s", path)
    return Resume(step=step, path=path, stream=stream, buffer_path=buffer_path, without_buffer=without_buffer)


def _stream(path: Path) -> StreamState:
    source = path / STREAM_STATE_NAME
    try:
        return stream_state_from_json(source.read_text(), str(source))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error


def _buffer(recipe: Recipe, path: Path, manifest: Manifest) -> tuple[Path | None, BufferFound]:
    if not recipe.checkpointing.load_replay_buffer:
        log.info("checkpointing.load_replay_buffer is false: the groups of the buffer are generated anew")
        return None, "not_loaded"
    if REPLAY_BUFFER_NAME not in manifest.files:
        return None, "absent"
    return path / REPLAY_BUFFER_NAME, "absent"


def _refuse_mixed_groups(recipe: Recipe, record: TrainingRecord, path: Path) -> None:
    saved, asked = record.num_generations_per_prompt, recipe.grpo.num_generations_per_prompt
    if saved != asked:
        raise ConfigError(
            f"{path} holds groups of {saved} answers, grpo.num_generations_per_prompt is {asked}, and groups of "
            f"different sizes are never mixed: set it to {saved}, or checkpointing.load_replay_buffer=false to "
            "generate the buffered prompts anew"
        )
