"""The optimizer's part of a checkpoint: moments, main parameters and the count of updates, for any layout.

Works around what Megatron 0.19 does not do for torch's own Adam: describe a fresh one, and read one back.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from .optimizer import active_adam

# How moments are stored: one tensor per parameter, in its own shape, so that any layout can read them.
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def sharded_state(adam: ChainedOptimizer, model_state: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
    """Moments and main parameters for (or as places for) a distributed checkpoint.

    `model_state` is the module's own sharded state. Collective for a save: data-parallel ranks gather their shards.
    """
    for one in adam.chained_optimizers:
        _allocate_moments(one)
    with _without_full_collection():
        return adam.sharded_state_dict(model_state, is_loading=is_loading, metadata=RESHARDABLE)


def take_over(adam: ChainedOptimizer, state: dict[Any, Any]) -> None:
    """Continue from a loaded `sharded_state`; rates, decay and betas stay those `adam` was built with."""
    chain = adam.chained_optimizers
    for number, one in enumerate(chain):
        own, saved = _param_groups(one.state_dict()), _param_groups(state if len(chain) == 1 else state[number])
        steps = [{"step": group["step"]} if "step" in group else {} for group in saved]
        saved[:] = [group | step for group, step in zip(own, steps, strict=True)]
    with _step_not_looked_for(chain):
        adam.load_state_dict(state)
    for one in chain:
        _unshare_steps(one)


@contextmanager
def _step_not_looked_for(chain: list[MegatronOptimizer]) -> Iterator[None]:
    """Megatron's loader wants every tensor of torch's Adam, but reads `step` with the groups: KeyError without this."""
    distributed = [one for one in chain if isinstance(one, DistributedOptimizer)]
    for one in distributed:
        one._set_main_param_and_optimizer_states = partial(_set_states_but_step, one)
    try:
        yield
    finally:
        for one in distributed:
            del one._set_main_param_and_optimizer_states  # the method of the class again


def _set_states_but_step(
    one: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
) -> None:
    DistributedOptimizer._set_main_param_and_optimizer_states(one, model_param, {"step": None} | tensors)


@contextmanager
def _without_full_collection() -> Iterator[None]:
    """Megatron ends its description of an optimizer with a collection of all garbage: 0.23 s of a 0.28 s stall.

    It does so for programs that have switched the collector off; freezing objects would undo what an engine froze.
    """
    distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        distrib_optimizer.gc = gc


def _allocate_moments(one: MegatronOptimizer) -> None:
    """What the first update would create: zero moments. Megatron cannot describe an optimizer without them."""
    one.init_state_fn(one.optimizer, one.config)
    if active_adam() == "torch":
        for state in one.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _unshare_steps(one: MegatronOptimizer) -> None:
    """Megatron loads ONE step tensor into all states of torch's Adam, which would then count each parameter's update."""
    for state in one.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


def _param_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups within a state of any of Megatron's optimizers; the plain float32 one has no inner optimizer."""
    return state.get("optimizer", state)["param_groups"]
