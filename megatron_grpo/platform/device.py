"""Which accelerator this process computes on, and the torch.distributed backend that belongs to it.

Knows nothing of Ray, and of Megatron only that the CPU adapter must be in place before it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import ConfigError
from . import cpu

if TYPE_CHECKING:
    from ..config.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A device and how ranks on such devices talk to each other."""

    device: torch.device
    backend: Literal["nccl", "gloo"]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def prepare(self) -> None:
        """Make this process ready for Megatron on this device; call before anything imports megatron."""
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        else:
            cpu.install()


CPU = Accelerator(device=torch.device("cpu"), backend="gloo")


# By variable, the values that grant nothing. SLURM_GPUS_ON_NODE is a number; the others list devices: "0" is one.
NO_GRANT = {
    "SLURM_GPUS_ON_NODE": ("", "0"),
    "SLURM_JOB_GPUS": ("",),
    "SLURM_STEP_GPUS": ("",),
    "CUDA_VISIBLE_DEVICES": ("", "-1", "NoDevFiles"),
}


def accelerator_for(recipe: Recipe, *, local_rank: int = 0) -> Accelerator:
    """The accelerator `recipe.cluster.accelerator` asks for in this process and environment."""
    return choose_accelerator(recipe.cluster.accelerator, local_rank=local_rank)


def choose_accelerator(
    setting: str, *, local_rank: int = 0, environ: Mapping[str, str] = os.environ, cuda_devices: int | None = None
) -> Accelerator:
    """The accelerator for `cluster.accelerator` = auto | cuda | cpu.

    `local_rank` is the index among the devices this process sees (Ray shows each actor only its own: 0);
    `cuda_devices` is the number torch sees, asked when None. Raises ConfigError when `cuda` is wanted and absent, and
    when `auto` would leave GPUs idle that Slurm or the environment granted: a job that silently runs on the CPU of a
    GPU node looks alive for hours.
    """
    if setting not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"cluster.accelerator is {setting!r}: choose auto, cuda or cpu")
    if setting == "cpu":
        return CPU
    seen = torch.cuda.device_count() if cuda_devices is None else cuda_devices
    if seen > 0:
        return Accelerator(device=torch.device("cuda", local_rank % seen), backend="nccl")
    if setting == "cuda":
        raise ConfigError(
            "cluster.accelerator is cuda, but torch sees no CUDA device: check the driver, the torch build and "
            "CUDA_VISIBLE_DEVICES, or set cluster.accelerator=cpu"
        )
    grant = granted_gpus(environ)
    if grant is not None:
        raise ConfigError(
            f"cluster.accelerator is auto and {grant} grants GPUs, but torch sees none: repair the driver or the torch "
            "build, or set cluster.accelerator=cpu to run on the CPU on purpose"
        )
    return CPU


def granted_gpus(environ: Mapping[str, str]) -> str | None:
    """The variable (as NAME=value) by which Slurm or the user granted GPUs to this process; None: no grant.

    An empty CUDA_VISIBLE_DEVICES grants nothing, and does not undo Slurm's grant either: Ray sets it for actors it
    gives no GPU, which is how a job with undetected GPUs would end up on the CPU.
    """
    for name, nothing in NO_GRANT.items():
        value = environ.get(name, "").strip()
        if value not in nothing:
            return f"{name}={value}"
    return None
