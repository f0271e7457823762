"""What Megatron-Core 0.19 needs to run on a machine without CUDA.

`install()` is called once per process before anything imports megatron. It does nothing where CUDA is there.

What it changes, and nothing else (each entry names the call that needs it):
- attributes of `torch.cuda` (STAND_INS), which without a driver raise;
- `torch.Tensor.pin_memory` and `.cuda` (TENSOR_METHODS), the identity on a host without a GPU;
- string constants inside the Megatron functions listed in LITERALS: `device="cuda"` becomes `"cpu"`, the type name
  `"torch.cuda.FloatTensor"` becomes `"torch.FloatTensor"`;
- the name `torch` inside the two inference modules that pin host memory (PINNING);
- attributes of Megatron modules that lead to a Triton kernel or a CUDA generator, or assert CUDA
  (MEGATRON_ATTRIBUTES).

torch's factories (`torch.tensor`, `torch.empty`, ...) are never replaced: `with torch.device(...)` recognises them by
identity, so wrapping them left transformers with uninitialised rotary frequencies, without an error.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass

import torch

from . import code_literals
from .cuda_stand_ins import STAND_INS, TENSOR_METHODS, UnpinnedTorch

LITERALS = {
    "megatron.core.pipeline_parallel.schedules": "the token counter of every forward_backward_func",
    "megatron.core.optimizer.clip_grads": "norm buffers of get_grad_norm_fp32; the FloatTensor test before clipping",
    "megatron.core.optimizer.distrib_optimizer": "the FloatTensor tests that sort parameters into shards",
    "megatron.core.optimizer.optimizer": "found_inf and scale of mixed precision; FP32Optimizer's scale",
    "megatron.core.transformer.utils": "the causal mask of the local attention",
    "megatron.core.utils": "the norm of a gradient list without apex or Transformer Engine",
}

PINNING = {
    "megatron.core.inference.contexts.dynamic_context": "pinned bookkeeping tensors of DynamicInferenceContext",
    "megatron.core.inference.text_generation_controllers.text_generation_controller": "pinned sampling buffers",
}


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Stands in for a function that queues the change until CUDA is initialised, which is never."""
    torch.default_generator.set_state(new_state)


def _exists(tensor: torch.Tensor | None) -> None:
    assert tensor is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced:
    """One module attribute that gets another value on the CPU."""

    module: str
    name: str
    value: object
    needed_by: str


MEGATRON_ATTRIBUTES = (
    Replaced(
        module="megatron.core.tensor_parallel.random",
        name="_set_cuda_rng_state",
        value=_set_rng_state,
        needed_by="the RNG tracker's fork() around the attention dropout, else one more queued closure per call",
    ),
    Replaced(
        module="megatron.core.inference.contexts.dynamic_context",
        name="triton_append_key_value_cache",
        value=None,
        needed_by="append_key_value_cache: None selects the torch code instead of a Triton kernel",
    ),
    Replaced(
        module="megatron.core.inference.communication_utils",
        name="_is_cuda",
        value=_exists,
        needed_by="an engine with pipeline stages: what the stages send to each other is asserted to be on a GPU",
    ),
)

_installed = False


def installed() -> bool:
    """Whether `install` changed this process (false where CUDA is available)."""
    return _installed


def install() -> None:
    """Make Megatron usable without CUDA; a no-op with CUDA or when done before.

    Raises RuntimeError when megatron was imported earlier: names it bound at import would stay unpatched, and a wrong
    RNG state or loss is all one would see of it.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if any(name == "megatron" or name.startswith("megatron.") for name in sys.modules):
        raise RuntimeError("platform.cpu.install() must run before the first import of megatron in this process")
    # jit_fuser is torch.compile, which would look for a C++ compiler at the first fused call.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    _replace_torch()
    _install_kernels()
    _replace_megatron()
    _installed = True


def _replace_torch() -> None:
    for path, value in STAND_INS.items():
        owner = torch.cuda
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    for name, value in TENSOR_METHODS.items():
        setattr(torch.Tensor, name, value)


def _install_kernels() -> None:
    try:
        kernels = importlib.import_module("megatron_grpo.platform.kernels")
    except ModuleNotFoundError as error:
        if error.name != "megatron_grpo.platform.kernels":
            raise
        return
    kernels.install()


def _replace_megatron() -> None:
    for module in LITERALS:
        code_literals.retarget(importlib.import_module(module))
    for module in PINNING:
        importlib.import_module(module).torch = UnpinnedTorch()
    for entry in MEGATRON_ATTRIBUTES:
        module = importlib.import_module(entry.module)
        assert hasattr(module, entry.name), f"{entry.module} has no {entry.name}: another megatron-core than 0.19?"
        setattr(module, entry.name, entry.value)
