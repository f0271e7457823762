"""What of a saved buffer may be used by a resumed run. Pure; reading the file is `storage`'s business."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import TrajectoryGroup
from .staleness import can_serve


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """`kept` groups in file order; `dropped` the ordinals whose prompts the stream hands out again."""

    kept: tuple[TrajectoryGroup, ...]
    dropped: tuple[int, ...]


def clean_restored(
    groups: Sequence[TrajectoryGroup], *, resume_step: int, num_prompts_per_step: int, max_age: int, capacity: int
) -> Restored:
    """Drop what cannot be used, in this order: trained steps, too old, more than P of a target, beyond capacity.

    Incomplete targets stay (the collector fills only the gap). Capacity goes to the nearest targets first.
    """
    usable = [g for g in groups if g.target_step >= resume_step]
    usable = [g for g in usable if can_serve(g.generation_version, g.target_step, max_age)]
    usable = _first_of_each_target(usable, num_prompts_per_step)
    nearest = sorted(usable, key=lambda group: group.target_step)[:capacity]
    fits = {group.ordinal for group in nearest}
    kept = tuple(group for group in usable if group.ordinal in fits)
    return Restored(kept=kept, dropped=tuple(g.ordinal for g in groups if g.ordinal not in fits))


def _first_of_each_target(groups: Sequence[TrajectoryGroup], limit: int) -> list[TrajectoryGroup]:
    taken: Counter[int] = Counter()
    kept = []
    for group in groups:
        taken[group.target_step] += 1
        if taken[group.target_step] <= limit:
            kept.append(group)
    return kept
