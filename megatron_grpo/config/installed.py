"""Which optional kernels a run would use here, found without importing anything heavy.

NVIDIA's apex is recognised by its `optimizers/fused_adam.py`: the unrelated PyPI package of that name has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CUDA_DEVICE_FILE = Path("/dev/nvidiactl")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveKernels:
    accelerator: str
    fused_adam: str
    layer_spec: str


def active_kernels(accelerator: str, layer_spec: str) -> ActiveKernels:
    """What `cluster.accelerator` and `policy.megatron_cfg.layer_spec` come to on this machine. Megatron prefers
    Transformer Engine's fused Adam, then apex's; both need CUDA."""
    device = accelerator if accelerator != "auto" else "cuda" if CUDA_DEVICE_FILE.exists() else "cpu"
    on_cuda = device == "cuda"
    has_te = on_cuda and find_spec("transformer_engine") is not None
    has_apex = on_cuda and _has_file("apex", "optimizers/fused_adam.py")
    adam = "Transformer Engine FusedAdam" if has_te else "apex FusedAdam" if has_apex else "torch AdamW"
    layers = "te" if has_te and layer_spec != "local" else "local"
    return ActiveKernels(accelerator=device, fused_adam=adam, layer_spec=layers)


def _has_file(package: str, relative: str) -> bool:
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / relative).is_file() for folder in folders or ())
