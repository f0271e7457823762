"""The prompt stream as a checkpoint holds it, and from where a resumed run continues. Pure; JSON text in and out.

Normally the saved frontier decides: nothing is skipped or repeated. Without it a run continues at the live cursor,
behind everything that was ever handed out, and loses the prompts that were in flight at the save.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import CheckpointError, ConfigError
from ..types import FrontierState, LiveCursor
from .stream import EpochOrder, PromptRow

FORMAT_VERSION = 1

# What a resume found: a buffer file with or without ordinals, none, or one that load_replay_buffer: false leaves alone.
BufferFound = Literal["with_ordinals", "without_ordinals", "absent", "not_loaded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """`cursor`: the next ordinal the stream would hand out. `frontier` None: the run kept no frontier, because of
    `unaligned_because`. `rows_digest` tells another data set from the same one.
    """

    order: EpochOrder
    cursor: int
    frontier: FrontierState | None
    unaligned_because: str | None
    rows_digest: str

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION} | asdict(self), indent=1) + "\n"


def stream_state_from_json(text: str, source: str) -> StreamState:
    """Raises CheckpointError naming `source` for another format version, a missing or a wrong entry.

    `frontier` and `unaligned_because` may be absent: that is how a checkpoint without alignment looks.
    """
    try:
        record = json.loads(text)
        version = record["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source} is not the state of a prompt stream: {error!r}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{source} has format version {version!r}; this release reads version {FORMAT_VERSION}")
    try:
        frontier = record.get("frontier")
        return StreamState(
            order=EpochOrder(**record["order"]),
            cursor=_ordinal(record["cursor"]),
            frontier=None if frontier is None else _frontier(frontier),
            unaligned_because=record.get("unaligned_because"),
            rows_digest=record["rows_digest"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} is damaged: {type(error).__name__}: {error}") from error


def resume_point(state: StreamState, buffer: BufferFound, source: str) -> FrontierState | LiveCursor:
    """Where a resumed run continues; a LiveCursor's reason is for the log and for the states this run will save.

    Alignment that a run does not have, its descendants never regain. Raises CheckpointError, naming `source`, when
    only one of frontier and ordinals is there: both are written together, so that one of them was lost or swapped.
    """
    if state.frontier is not None:
        if buffer == "without_ordinals":
            raise CheckpointError(f"{source} is damaged: it has a data frontier, but its buffer has no ordinals")
        return state.frontier
    if buffer == "with_ordinals":
        raise CheckpointError(f"{source} is damaged: its buffer has ordinals, but the data frontier is missing")
    reason = state.unaligned_because or "the checkpoint has neither a data frontier nor ordinals"
    if buffer == "not_loaded":
        reason += "; load_replay_buffer is false, so that the prompts of the buffered groups are lost"
    return LiveCursor(position=state.cursor, reason=reason)


def frontier_at(cursor: LiveCursor) -> FrontierState:
    """Everything before the cursor counts as done: what `PromptStream.restore` needs to start there."""
    return FrontierState(cut=cursor.position, frontier=cursor.position, trained_above_cut=(), dropped_above_cut=())


def reason_unstampable(extra_env_info: object) -> str | None:
    """Why a row of a third-party stream cannot carry an ordinal; None: it can."""
    if isinstance(extra_env_info, Mapping):
        return None
    return f"a row's extra_env_info is a {type(extra_env_info).__name__}, not a mapping: it cannot carry an ordinal"


def rows_digest(rows: Iterable[PromptRow]) -> str:
    """What the data set is, whatever file it came from: environment, question, answer and tokens of every row."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(repr((row.env_name, row.problem.question, row.problem.answer, row.token_ids)).encode())
    return digest.hexdigest()


def check_same_rows(state: StreamState, *, num_rows: int, digest: str) -> None:
    """Raises ConfigError when the data set is not the one that the run started with."""
    if state.order.num_rows != num_rows:
        found = f"has {num_rows} usable rows, the run started with {state.order.num_rows}"
    elif state.rows_digest != digest:
        found = f"has as many rows ({num_rows}), but other ones than the run started with"
    else:
        return
    raise ConfigError(
        f"the training data {found}: ordinals would point to other prompts. Restore the data (or the tokenizer and "
        "prompt template that changed it), or start a new run with another checkpointing.checkpoint_dir"
    )


def _frontier(record: Mapping[str, Any]) -> FrontierState:
    return FrontierState(
        cut=_ordinal(record["cut"]),
        frontier=_ordinal(record["frontier"]),
        trained_above_cut=tuple(_ordinal(one) for one in record["trained_above_cut"]),
        dropped_above_cut=tuple(_ordinal(one) for one in record["dropped_above_cut"]),
        num_owed=_ordinal(record["num_owed"]),
    )


def _ordinal(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value
