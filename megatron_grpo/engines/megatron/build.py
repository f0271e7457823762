"""What a worker process builds on a rank: a policy, or a bare model for a generation engine, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel

from ...conversion.mapping import WeightMapping
from ...platform.device import Accelerator
from ...weight_sync.hf_model import hf_architecture
from ...weight_sync.stream import WeightStream
from ...weight_sync.stream_channels import CHANNELS
from .export import WeightExport
from .model import assemble_model, build_model
from .parallel import init_world, second_groups
from .policy import MegatronPolicy, Rendezvous

if TYPE_CHECKING:
    from ...config.schema import Recipe
    from ...layout import World


def policy(
    recipe: Recipe, world: World, rank: int, rendezvous: Rendezvous, vocab_size: int, accelerator: Accelerator
) -> MegatronPolicy:
    """Join the trainer's world and build its part of the policy."""
    return MegatronPolicy(recipe, world, rank, rendezvous, vocab_size=vocab_size, accelerator=accelerator)


def generation_module(
    recipe: Recipe, world: World, rank: int, rendezvous: Rendezvous, vocab_size: int, accelerator: Accelerator
) -> HybridModel:
    """Join the generators' own world and build a model without gradients; a refit brings the weights."""
    init_world(
        world, rank, rendezvous.host, rendezvous.port, accelerator, recipe.timeouts.actor_start, recipe.grpo.seed
    )
    return build_model(recipe, world, vocab_size, accelerator).eval().requires_grad_(False)


def second_module(recipe: Recipe, engine_world: World, vocab_size: int, accelerator: Accelerator) -> HybridModel:
    """A model for the engine beside the policy of this process, cut as `engine_world` says; its weights are unset.

    Collective over the world, which the policy has joined.
    """
    model = assemble_model(recipe, engine_world, vocab_size, accelerator, second_groups(engine_world))
    return model.eval().requires_grad_(False)


def weight_stream(recipe: Recipe, module: HybridModel, vocab_size: int, accelerator: Accelerator) -> WeightStream:
    """This rank's end of a stream to an engine that reads Hugging Face names. Collective over the trainer's world."""
    export = WeightExport(module, WeightMapping(hf_architecture(recipe, vocab_size)))
    return WeightStream(
        export, rank=dist.get_rank(), device=accelerator.device, open_channel=CHANNELS[accelerator.backend]
    )
