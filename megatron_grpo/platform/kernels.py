"""Stand-ins for compiled kernels that Megatron imports by name, for machines without CUDA.

`install()` registers a module `flash_attn` with the two functions that the dynamic inference engine calls. It must run
before `megatron.core.transformer.attention` is imported (that module binds the functions at import). Where the real
package is importable nothing is replaced.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

import torch
from torch import Tensor

from .attention import Keys, Rule, ragged_attention

# Megatron reads the version to choose between calling conventions; these functions follow the one of 2.8.3.
FLASH_ATTN_VERSION = "2.8.3"


def install() -> None:
    """Make `import flash_attn` work. Does nothing when a `flash_attn` is there already."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    module = types.ModuleType("flash_attn", "Torch reference of two flash-attn functions.")
    module.__version__ = FLASH_ATTN_VERSION
    # importlib.util.find_spec, which libraries use as an "is it there" test, raises on a module without a spec.
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", loader=None)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    sys.modules["flash_attn"] = module


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over packed rows; signature and layout of flash-attn 2.8.3.

    q [total_q, H, D]; k and v [total_k, Hk, D], or [blocks, page, Hk, D] with `block_table` [B, pages]. Lengths come
    from the cumulative `cu_seqlens_*` [B + 1]; the two `max_seqlen_*` are not needed. Returns [total_q, H, D], with
    `return_attn_probs` also the log-sum-exp [H, total_q] and None.
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    starts = cu_seqlens_q[:-1].long()
    paged = block_table is not None
    keys = Keys.paged(k, v, block_table) if paged else Keys.packed(k, v, cu_seqlens_k[:-1])
    rule = Rule(scale=_scale(q, softmax_scale), causal=causal, window=tuple(window_size))
    out, lse = ragged_attention(
        q, starts, cu_seqlens_q.diff(), keys, cu_seqlens_k.diff(), rule, need_lse=return_attn_probs
    )
    return (out, lse.transpose(0, 1), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode attention over a cache; signature and layout of flash-attn 2.8.3.

    q [B, S, H, D]; caches [blocks, page, Hk, D] with `block_table` [B, pages], or [B, L, Hk, D] without. The cache is
    read only: appending `k` and `v` and rotating inside the call is not supported. Returns [B, S, H, D], with
    `return_softmax_lse` also the log-sum-exp [B, H, S].
    """
    _refuse(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    rows, num_q, heads, dim = q.shape
    starts = torch.arange(rows, device=q.device) * num_q
    table = block_table if block_table is not None else torch.arange(rows, device=q.device)[:, None]
    lengths = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    lengths = torch.as_tensor(lengths, device=q.device).expand(rows)
    out, lse = ragged_attention(
        q.reshape(rows * num_q, heads, dim),
        starts,
        torch.full_like(starts, num_q),
        Keys.paged(k_cache, v_cache, table),
        lengths,
        Rule(scale=_scale(q, softmax_scale), causal=causal, window=tuple(window_size)),
        need_lse=return_softmax_lse,
    )
    out = out.view(rows, num_q, heads, dim)
    return (out, lse.view(rows, num_q, heads).transpose(1, 2)) if return_softmax_lse else out


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _refuse(**unsupported: object) -> None:
    """Raise for an option the reference does not compute, rather than ignore it."""
    for name, value in unsupported.items():
        if value is not None and not (isinstance(value, float | int) and value == 0):
            raise NotImplementedError(f"the CPU flash-attn reference has no {name} (got {value!r}); run on CUDA")
