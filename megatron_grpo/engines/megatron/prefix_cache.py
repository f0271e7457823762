"""Forgets cached prefixes when weights change, so that new requests never attend to keys of old weights.

Megatron has no call for this: its own reset also drops running requests, and a suspend in the modes `persist` and
`offload` keeps the hash table (a prompt served from it was off by 0.08 in log-prob after an update).
"""

from __future__ import annotations

import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.engines import DynamicInferenceEngine


def forget(engine: DynamicInferenceEngine) -> None:
    """Drop every cached prefix; running requests keep their blocks. Call on every rank, while nothing steps."""
    allocator = engine.context.kv_block_allocator
    if allocator.enable_prefix_caching:
        _forget_blocks(allocator)
        _forget_half_prefilled(engine)


def _forget_blocks(allocator: KVBlockAllocator) -> None:
    hashed = allocator.block_hashes != -1
    unused = (hashed & (allocator.block_ref_counts == 0)).nonzero().flatten().to(torch.int32)
    allocator._deregister_blocks(unused)  # back to the free pool
    # Blocks in use stay with their requests but can no longer be found by another one.
    allocator.kv_hash_to_block_id.clear()
    allocator.block_hashes.fill_(-1)
    if allocator.prefix_caching_eviction_policy == PrefixCachingEvictionPolicy.LRU:
        allocator.block_parent_id.fill_(-1)
        allocator.block_child_count.fill_(0)


def _forget_half_prefilled(engine: DynamicInferenceEngine) -> None:
    """Keep a prompt that is being prefilled in chunks from offering its later blocks.

    Their keys attend to the old ones of its earlier chunks; and a lookup takes for granted that all blocks before a
    known one are known too, so that a sibling's would raise KeyError.
    """
    for entry in engine.requests.values():
        request = entry.record[-1]
        if request.finished_chunk_token_count > 0:
            request.precomputed_block_hashes = []
