"""What a checkpoint holds of a policy, described for Megatron's distributed checkpoints, and put back from one."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, replace

from ...errors import CheckpointError
from .optimizer_state import sharded_state, take_over

if TYPE_CHECKING:
    from .policy import MegatronPolicy
    from .reference import FrozenWeights

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
REFERENCE = "reference."


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known before any weight is read; equal on all ranks.

    `position` counts the updates of the schedule. `layout` is the cut of the ranks that saved: only those can take
    their random states back.
    """

    format_version: int
    position: int
    has_reference: bool
    layout: tuple[int, ...]

    @classmethod
    def of(cls, policy: MegatronPolicy) -> Header:
        world = policy.world
        return cls(
            format_version=FORMAT_VERSION,
            position=policy.optimizer.position,
            has_reference=policy.reference is not None,
            layout=(world.size, world.tp, world.pp, world.cp, world.ep, world.etp),
        )

    @classmethod
    def from_common(cls, common: dict[str, Any]) -> Header:
        """Raises CheckpointError for a checkpoint of another program or format."""
        saved = common.get("policy")
        if saved is None:
            raise CheckpointError("it was not written by this trainer; it holds no `policy` entry")
        if saved["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"it has format version {saved['format_version']}, this program reads {FORMAT_VERSION}: resume with "
                "the program that wrote it"
            )
        return cls(**saved | {"layout": tuple(saved["layout"])})


def contents_of(policy: MegatronPolicy) -> ShardedStateDict:
    """Everything to save; collective, since moments are gathered. Tensors are the live ones, or their copies."""
    contents = _tensors(policy, is_loading=False, with_reference=policy.reference is not None)
    return contents | {"policy": asdict(Header.of(policy)), "rng": _random_object(_random_states())}


def places_for(policy: MegatronPolicy, header: Header) -> ShardedStateDict:
    """Where what `header` announces goes.

    Raises CheckpointError when the policy needs reference weights and there are none.
    """
    if policy.reference is not None and not header.has_reference:
        raise CheckpointError(
            "it has no reference weights: it was saved with loss_fn.reference_policy_kl_penalty 0. Keep that value, or "
            "start a new run from the exported weights"
        )
    places = _tensors(policy, is_loading=True, with_reference=policy.reference is not None)
    return places | ({"rng": _random_object(None)} if _same_layout(policy, header) else {})


def put_back(policy: MegatronPolicy, header: Header, loaded: dict[str, Any]) -> None:
    """Make `policy` what was saved; weights change in place."""
    policy.module.load_state_dict(loaded["model"], strict=True)
    take_over(policy.optimizer.adam, loaded["optimizer"])
    policy.optimizer.go_to(header.position)
    if policy.reference is not None:
        policy.reference.replace(loaded["reference"])
    if _same_layout(policy, header):
        _restore_random(loaded["rng"])
    else:
        logger.info(
            "resumed from layout %s at %s: random states start from the seed", header.layout, Header.of(policy).layout
        )


def _tensors(policy: MegatronPolicy, *, is_loading: bool, with_reference: bool) -> ShardedStateDict:
    model = policy.module.sharded_state_dict()
    contents = {"model": model, "optimizer": sharded_state(policy.optimizer.adam, model, is_loading=is_loading)}
    if with_reference:
        contents["reference"] = _reference_state(policy.module, policy.reference)
    return contents


def _reference_state(module: torch.nn.Module, reference: FrozenWeights) -> ShardedStateDict:
    """The frozen weights, cut as the module's own."""
    cut = module.sharded_state_dict(prefix=REFERENCE)
    return {name: replace(cut[REFERENCE + name], data=weights) for name, weights in reference.weights.items()}


def _same_layout(policy: MegatronPolicy, header: Header) -> bool:
    return header.layout == Header.of(policy).layout


def _random_object(states: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _random_states() -> dict[str, Any]:
    states = {"host": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["host"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
