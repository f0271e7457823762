"""Joins one rank to its world: the process group, Megatron's parallel groups and the random seeds."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.inference.shards import build_inference_pg_collection
from megatron.core.process_groups_config import ProcessGroupCollection

from ...platform import cpu
from ...platform.device import Accelerator

if TYPE_CHECKING:
    from ...layout import World

GROUP_ORDER = "tp-cp-ep-dp-pp"  # as layout.World numbers its ranks


def init_world(
    world: World, rank: int, host: str, port: int, accelerator: Accelerator, timeout_s: float, seed: int = 1234
) -> None:
    """Join the world of `world.size` ranks that meet at host:port, with every parallel group of the layout.

    Collective over the world. `timeout_s` bounds each wait for a peer, later collectives included; torch raises
    DistStoreError or RuntimeError when it runs out.
    """
    if not accelerator.is_cuda:
        assert cpu.installed(), "Accelerator.prepare() must run before megatron is imported on a CPU"
    dist.init_process_group(
        accelerator.backend,
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=accelerator.device if accelerator.is_cuda else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        virtual_pipeline_model_parallel_size=world.vpp if world.vpp > 1 else None,
        context_parallel_size=world.cp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        order=GROUP_ORDER,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def second_groups(world: World) -> ProcessGroupCollection:
    """Process groups for a second model over the ranks of the world this rank has joined, cut as `world` says.

    Collective. `parallel_state` stays that of the first model, so the second one must be given these groups.
    """
    assert world.size == dist.get_world_size(), f"{world.size} ranks in a world of {dist.get_world_size()}"
    return build_inference_pg_collection(
        world_size=world.size,
        tp_size=world.tp,
        pp_size=world.pp,
        cp_size=world.cp,
        ep_size=world.ep,
        expt_tp_size=world.etp,
    )


def close_world() -> None:
    """Leave the world; harmless when it was never joined."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_shard_representative() -> bool:
    """Whether this rank speaks for its data-parallel shard: it holds the loss, and no other rank repeats it."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first and parallel_state.is_pipeline_last_stage()
