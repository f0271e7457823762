"""The engine's key/value cache while weights change: who rebuilds it, and the memory it holds meanwhile.

| `kv_cache_management_mode` | `pause` .. `resume` | `sleep` .. `wake` | running requests afterwards |
|---|---|---|---|
| `persist` | stays on the device | stays on the device | new weights, old keys and values |
| `offload` | stays on the device | moves to host memory and back | new weights, old keys and values |
| `recompute` | freed | freed | as a fresh engine on prompt + generated so far |

A request that the engine evicted for lack of blocks is recomputed in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts import DynamicInferenceContext

# What a suspend moves or frees: attention caches, and recurrent states where there are Mamba layers.
_BUFFERS = ("memory_buffer", "mamba_conv_states", "mamba_ssm_states")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvBytes:
    """Bytes of one rank's cache on its device (the GPU; without one, the engine's side of host memory)."""

    held: int
    released: int


class KvCache:
    """The cache of `context`, which must hold all of its buffers at construction."""

    def __init__(self, context: DynamicInferenceContext):
        self._context = context
        self._full = self._held()

    @property
    def mode(self) -> str:
        return self._context.kv_cache_management_mode.value

    @property
    def is_rebuilt(self) -> bool:
        """Whether running requests must lose their cache when weights change; Megatron does it in a suspend only."""
        return self._context.kv_cache_management_mode == KVCacheManagementMode.RECOMPUTE

    def bytes(self) -> KvBytes:
        held = self._held()
        return KvBytes(held=held, released=self._full - held)

    def _held(self) -> int:
        present = vars(self._context)  # a recompute suspend deletes the attributes
        return sum(present[name].untyped_storage().nbytes() for name in _BUFFERS if name in present)
