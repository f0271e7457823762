"""The one place that chooses how weights reach an engine: from what its backend declares and what the recipe asks."""

from __future__ import annotations

from ..interfaces import Collector, Engine, WeightSync, WeightTransfer
from .colocated import ColocatedSync
from .disjoint import DisjointSync
from .quiet import choose_quiet


def choose_weight_sync(
    *, collector: Collector, engine: Engine, transfer: WeightTransfer, in_flight: bool
) -> WeightSync:
    """`transfer` is left aside where waking the engine carries the weights."""
    quiet = choose_quiet(collector, engine, in_flight=in_flight)
    if engine.capabilities.wake_carries_weights:
        return ColocatedSync(collector=collector, engine=engine, quiet=quiet)
    return DisjointSync(collector=collector, engine=engine, transfer=transfer, quiet=quiet)
