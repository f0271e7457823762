"""Groups <-> columns: every token of every trajectory in one array, cut up by lengths.

A file of few large tensors is written at the speed of the disk; 80,000 small ones are not. Knows no files.

    R = trajectories of all groups, K = groups, N = tokens of all trajectories, M = tokens of all prompts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ..types import FinishReason, Prompt, Trajectory, TrajectoryGroup
from .problem_text import problem_from_text, problem_to_text

Columns = dict[str, Any]  # tensors, lists of str: what `torch.load(weights_only=True)` lets through

# name, dtype, what it counts
TENSORS = (
    ("token_ids", torch.int32, "N"),
    ("loss_mask", torch.bool, "N"),
    ("generation_logprobs", torch.float32, "N"),
    ("token_versions", torch.int32, "N"),
    ("lengths", torch.int64, "R"),
    ("rewards", torch.float64, "R"),
    ("finish_reasons", torch.int16, "R"),  # index into `words`
    ("masked_because", torch.int16, "R"),  # index into `words`, -1: it trains
    ("group_sizes", torch.int64, "K"),
    ("prompt_token_ids", torch.int32, "M"),
    ("prompt_lengths", torch.int64, "K"),
)
LISTS = (("env_names", "K"), ("problems", "K"), ("words", None))  # of str; problems are JSON text


def to_columns(groups: Sequence[TrajectoryGroup]) -> Columns:
    """Raises TypeError for a problem that JSON cannot hold, naming the prompt and the key."""
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    words = sorted({row.finish_reason for row in rows} | {row.masked_because for row in rows if row.masked_because})
    index = {word: place for place, word in enumerate(words)} | {None: -1}
    return {
        "token_ids": _joined([row.token_ids for row in rows], np.int32),
        "loss_mask": _joined([row.loss_mask for row in rows], np.bool_),
        "generation_logprobs": _joined([row.generation_logprobs for row in rows], np.float32),
        "token_versions": _joined([row.token_versions for row in rows], np.int32),
        "lengths": _column([len(row.token_ids) for row in rows], np.int64),
        "rewards": _column([row.reward for row in rows], np.float64),
        "finish_reasons": _column([index[row.finish_reason] for row in rows], np.int16),
        "masked_because": _column([index[row.masked_because or None] for row in rows], np.int16),
        "group_sizes": _column([len(group.trajectories) for group in groups], np.int64),
        "prompt_token_ids": _column([t for group in groups for t in group.prompt.token_ids], np.int32),
        "prompt_lengths": _column([len(group.prompt.token_ids) for group in groups], np.int64),
        "env_names": [group.prompt.env_name for group in groups],
        "problems": [_problem_text(group) for group in groups],
        "words": words,
    }


def check_columns(columns: Any) -> Iterator[str]:
    """Everything that keeps `from_columns` from working, as sentences."""
    if not isinstance(columns, dict):
        yield f"trajectories is a {type(columns).__name__}, not a table of columns"
        return
    for name, dtype, _ in TENSORS:
        column = columns.get(name)
        if not isinstance(column, torch.Tensor) or column.dtype != dtype or column.ndim != 1:
            yield f"trajectories.{name} is not a one-dimensional tensor of {dtype}"
    for name, _ in LISTS:
        column = columns.get(name)
        if not isinstance(column, list) or not all(isinstance(text, str) for text in column):
            yield f"trajectories.{name} is not a list of strings"


def check_lengths(columns: Mapping[str, Any]) -> Iterator[str]:
    """Whether the columns, each well formed, fit together."""
    sizes = {"K": len(columns["group_sizes"]), "R": len(columns["lengths"])}
    for name in ("group_sizes", "lengths", "prompt_lengths"):
        if len(columns[name]) and int(columns[name].min()) < 0:
            yield f"trajectories.{name} holds a negative length"
    for name, counted, total in (("group_sizes", "lengths", "R"), ("lengths", "token_ids", "N")):
        sizes[total] = int(columns[name].sum())
        if sizes[total] != len(columns[counted]):
            yield f"trajectories.{name} adds up to {sizes[total]}, but {counted} has {len(columns[counted])} entries"
    sizes["M"] = int(columns["prompt_lengths"].sum())
    for name, counts in [(name, counts) for name, _, counts in TENSORS] + list(LISTS):
        if counts is not None and len(columns[name]) != sizes[counts]:
            yield f"trajectories.{name} has {len(columns[name])} entries instead of {sizes[counts]}"
    for name, lowest in (("finish_reasons", 0), ("masked_because", -1)):
        column = columns[name]
        if len(column) and not lowest <= int(column.min()) <= int(column.max()) < len(columns["words"]):
            yield f"trajectories.{name} points outside of words"
    if not bool(torch.isfinite(columns["rewards"]).all()):
        yield "trajectories.rewards holds a value that is not finite"


def from_columns(
    columns: Mapping[str, Any], *, ordinals: Sequence[int], versions: Sequence[int], targets: Sequence[int]
) -> tuple[TrajectoryGroup, ...]:
    """The groups of checked columns, in file order. The arrays are views of the columns: nothing is copied.

    Raises ValueError for a problem that is not the JSON text of one.
    """
    rows = list(_rows(columns))
    ends = _cuts(columns["group_sizes"])
    prompt_ids = columns["prompt_token_ids"].tolist()
    groups = []
    for place, ((first, last), (begin, end)) in enumerate(zip(ends, _cuts(columns["prompt_lengths"]), strict=True)):
        prompt = Prompt(
            ordinal=ordinals[place],
            token_ids=tuple(prompt_ids[begin:end]),
            env_name=columns["env_names"][place],
            problem=problem_from_text(columns["problems"][place]),
        )
        groups.append(
            TrajectoryGroup(
                ordinal=ordinals[place],
                prompt=prompt,
                trajectories=tuple(rows[first:last]),
                generation_version=versions[place],
                target_step=targets[place],
            )
        )
    return tuple(groups)


def _problem_text(group: TrajectoryGroup) -> str:
    try:
        return problem_to_text(group.prompt.problem)
    except TypeError as error:
        raise TypeError(f"prompt {group.ordinal}: {error}") from error


def _rows(columns: Mapping[str, Any]) -> Iterator[Trajectory]:
    arrays = [columns[name].numpy() for name in ("token_ids", "loss_mask", "generation_logprobs", "token_versions")]
    words: list[str] = columns["words"]
    each = zip(
        _cuts(columns["lengths"]),
        columns["rewards"].tolist(),
        columns["finish_reasons"].tolist(),
        columns["masked_because"].tolist(),
        strict=True,
    )
    for (begin, end), reward, finish, masked in each:
        token_ids, loss_mask, logprobs, versions = (array[begin:end] for array in arrays)
        yield Trajectory(
            token_ids=token_ids,
            loss_mask=loss_mask,
            generation_logprobs=logprobs,
            token_versions=versions,
            reward=reward,
            finish_reason=_finish_reason(words[finish]),
            masked_because=words[masked] if masked >= 0 else None,
        )


def _finish_reason(word: str) -> FinishReason:
    match word:
        case "stop" | "length":
            return word
    raise ValueError(f"a trajectory ended by {word!r}, which is neither stop nor length")


def _cuts(lengths: torch.Tensor) -> list[tuple[int, int]]:
    """Lengths 2, 3 -> (0, 2), (2, 5)."""
    return list(pairwise([0, *accumulate(lengths.tolist())]))


def _column(values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype))  # torch itself reads lists ten times slower


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    """One copy, straight into the memory that is saved. Bytes join twice as fast as arrays concatenate."""
    declared = np.dtype(dtype)
    if any(array.dtype is not declared or array.strides != (declared.itemsize,) for array in arrays):
        arrays = [np.ascontiguousarray(array, declared) for array in arrays]
    joined = bytearray().join(arrays)
    return torch.from_numpy(np.frombuffer(joined, declared) if joined else np.empty(0, declared))
