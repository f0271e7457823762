"""Two names of one setting. The later layer decides; different values in one layer are refused.

A follower takes its value from a leading key (dtypes from `policy.precision`): it may repeat it, never contradict it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .sources import KeyPath, value_at
from .unsupported import backend_of, foreign_backend

MEGATRON = "policy.megatron_cfg"

SAME = (
    ("grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards"),
    ("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline"),
    (f"{MEGATRON}.optimizer.clip_grad", "policy.max_grad_norm"),
)


def _itself(value: Any) -> Any:
    return value


def _is_bfloat16(precision: Any) -> Any:
    return precision == "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    key: str
    leader: str
    default: Any  # of the leader, where no layer sets it
    follow: Callable[[Any], Any] = _itself


FOLLOWERS = (
    Follower(key=f"{MEGATRON}.pipeline_dtype", leader="policy.precision", default="bfloat16"),
    Follower(key=f"{MEGATRON}.optimizer.bf16", leader="policy.precision", default="bfloat16", follow=_is_bfloat16),
    Follower(key="policy.generation.vllm_cfg.precision", leader="policy.precision", default="bfloat16"),
    Follower(key=f"{MEGATRON}.scheduler.start_weight_decay", leader=f"{MEGATRON}.optimizer.weight_decay", default=0.01),
    Follower(key=f"{MEGATRON}.scheduler.end_weight_decay", leader=f"{MEGATRON}.optimizer.weight_decay", default=0.01),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unified:
    """Both names carry the decided value; problems are (key, text)."""

    values: dict[str, Any]
    problems: tuple[tuple[KeyPath, str], ...]


def unify(values: dict[str, Any], last_set: dict[KeyPath, int]) -> Unified:
    values = copy.deepcopy(values)
    problems = [
        *(problem for group in SAME for problem in _unify_names(group, values, last_set)),
        *(problem for follower in FOLLOWERS for problem in _follow(follower, values, last_set)),
    ]
    return Unified(values=values, problems=tuple(problems))


def _unify_names(group: tuple[str, ...], values: dict, last_set: dict[KeyPath, int]) -> Iterator[tuple[KeyPath, str]]:
    paths = [tuple(name.split(".")) for name in group]
    given = [path for path in paths if path in last_set and value_at(values, path) is not None]
    if not given:
        return
    top = max(last_set[path] for path in given)
    deciding = [path for path in given if last_set[path] == top]
    chosen = value_at(values, deciding[0])
    if any(value_at(values, path) != chosen for path in deciding):
        listed = " and ".join(f"{'.'.join(path)} = {value_at(values, path)!r}" for path in deciding)
        yield deciding[0], f"{listed} are two names of one setting with different values; keep one"
    for path in paths:
        _set(values, path, chosen)


def _follow(follower: Follower, values: dict, last_set: dict[KeyPath, int]) -> Iterator[tuple[KeyPath, str]]:
    key, leader = tuple(follower.key.split(".")), tuple(follower.leader.split("."))
    leading = value_at(values, leader)
    leading = follower.default if leading is None else leading
    wanted, given = follower.follow(leading), value_at(values, key)
    inert = foreign_backend(follower.key, backend_of(values))
    contradicts = given is not None and given != wanted and last_set.get(key, -1) >= last_set.get(leader, -1)
    if contradicts and not inert:
        yield key, f"{given!r} contradicts {follower.leader} = {leading!r}, which decides it; leave it out"
    _set(values, key, wanted)


def _set(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        below = values.setdefault(part, {})
        if not isinstance(below, dict):
            return
        values = below
    values[path[-1]] = value
