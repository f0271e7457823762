"""The torch stand-ins of flash-attn against a loop over rows, queries and heads in float64."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.platform import kernels


def loop_attention(q, k, v, scale, causal, window):
    """One row: q [lq, H, D], k and v [lk, Hk, D] -> out [lq, H, D], lse [lq, H], float64."""
    (lq, heads, dim), (lk, kv_heads) = q.shape, k.shape[:2]
    out = torch.zeros(lq, heads, dim, dtype=torch.float64)
    lse = torch.full((lq, heads), -math.inf, dtype=torch.float64)
    for i in range(lq):
        at = i + lk - lq
        right = 0 if causal else window[1]
        seen = [
            j
            for j in range(lk)
            if (right < 0 or j <= at + right) and (window[0] < 0 or j >= at - window[0])
        ]
        if not seen:
            continue
        for h in range(heads):
            kh = h // (heads // kv_heads)
            scores = (k[seen, kh].double() @ q[i, h].double()) * scale
            lse[i, h] = torch.logsumexp(scores, 0)
            out[i, h] = torch.softmax(scores, 0) @ v[seen, kh].double()
    return out, lse


def paged_cache(lengths, page, kv_heads, dim, generator):
    """Contiguous rows and the same keys scattered over shuffled pages; unused table entries are -1."""
    pages = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(pages) + 3, generator=generator)
    cache = torch.full((2, len(order), page, kv_heads, dim), math.nan)  # what nobody wrote must never be read
    table = torch.full((len(lengths), max([*pages, 1]) + 1), -1, dtype=torch.int32)
    rows, taken = [], 0
    for b, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        mine = order[taken : taken + count]
        table[b, :count] = mine.int()
        row = torch.full((2, count * page, kv_heads, dim), math.nan)
        row[:, :n] = torch.randn(2, n, kv_heads, dim, generator=generator)
        cache[:, mine] = row.view(2, count, page, kv_heads, dim)
        rows.append(row[:, :n])
        taken += count
    return cache, table, rows


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=7),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([(-1, -1), (3, -1), (0, 0), (2, 2)]),
    causal=st.booleans(),
    page=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_varlen_equals_the_loop_for_ragged_rows(rows, heads, window, causal, page, seed):
    generator = torch.Generator().manual_seed(seed)
    cache, table, kv = paged_cache([lk for _, lk in rows], page, heads[1], 8, generator)
    q = [torch.randn(lq, heads[0], 8, generator=generator) for lq, _ in rows]
    cu_q = torch.tensor([0] + [lq for lq, _ in rows]).cumsum(0).int()
    cu_k = torch.tensor([0] + [lk for _, lk in rows]).cumsum(0).int()
    expected = [
        loop_attention(a, b[0], b[1], 8**-0.5, causal, window) for a, b in zip(q, kv, strict=True)
    ]
    out = torch.cat([o for o, _ in expected])
    lse = torch.cat([x for _, x in expected])
    args = (torch.cat(q), cache[0], cache[1], cu_q, cu_k, 99, 99)
    options = {"causal": causal, "window_size": window}
    got, got_lse, _ = kernels.flash_attn_varlen_func(*args, block_table=table, return_attn_probs=True, **options)
    torch.testing.assert_close(got.double(), out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got_lse.T.double(), lse, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(kernels.flash_attn_varlen_func(*args, block_table=table, **options), got)
    packed = [torch.cat([b[i] for b in kv]) for i in (0, 1)]
    if len(packed[0]):
        args = (torch.cat(q), *packed, cu_q, cu_k, 99, 99)
        torch.testing.assert_close(kernels.flash_attn_varlen_func(*args, **options), got)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    num_q=st.sampled_from([1, 1, 3]),
    heads=st.sampled_from([(4, 4), (8, 2)]),
    window=st.sampled_from([(-1, -1), (5, -1)]),
    seed=st.integers(0, 99),
)
def test_decode_equals_the_loop_over_a_paged_cache(lengths, num_q, heads, window, seed):
    generator = torch.Generator().manual_seed(seed)
    cache, table, kv = paged_cache(lengths, 16, heads[1], 16, generator)
    q = torch.randn(len(lengths), num_q, heads[0], 16, generator=generator)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    options = {"cache_seqlens": seqlens, "block_table": table, "causal": True, "window_size": window}
    got = kernels.flash_attn_with_kvcache(q, cache[0], cache[1], softmax_scale=0.3, **options)
    same, lse = kernels.flash_attn_with_kvcache(
        q, cache[0], cache[1], softmax_scale=0.3, return_softmax_lse=True, **options
    )
    torch.testing.assert_close(same, got)
    for b in range(len(lengths)):
        out, row_lse = loop_attention(q[b], kv[b][0], kv[b][1], 0.3, True, window)
        torch.testing.assert_close(got[b].double(), out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse[b].T.double(), row_lse, atol=2e-6, rtol=1e-5)


def test_one_very_long_row_does_not_pad_the_short_ones():
    generator = torch.Generator().manual_seed(0)
    lengths = [3000] + [20] * 63
    cache, table, _ = paged_cache(lengths, 16, 2, 8, generator)
    q = torch.randn(len(lengths), 1, 2, 8, generator=generator)
    sizes = []
    inner = kernels.ragged_attention.__globals__["_attend"]

    def measure(query, keys, *rest, **options):
        sizes.append(keys.shape[0] * keys.shape[1])
        return inner(query, keys, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.ragged_attention.__globals__, "_attend", measure)
        kernels.flash_attn_with_kvcache(
            q, cache[0], cache[1], cache_seqlens=torch.tensor(lengths), block_table=table, causal=True
        )
    assert sum(sizes) <= 2 * sum(lengths)


def test_bfloat16_stays_bfloat16_and_close():
    generator = torch.Generator().manual_seed(0)
    cache, table, kv = paged_cache([9, 33], 16, 2, 16, generator)
    q = torch.randn(2, 1, 4, 16, generator=generator).bfloat16()
    half = cache.bfloat16()
    out = kernels.flash_attn_with_kvcache(
        q, half[0], half[1], cache_seqlens=torch.tensor([9, 33]), block_table=table, causal=True
    )
    assert out.dtype == torch.bfloat16
    for b in range(2):
        expected, _ = loop_attention(q[b], kv[b][0].bfloat16(), kv[b][1].bfloat16(), 0.25, True, (-1, -1))
        torch.testing.assert_close(out[b].double(), expected, atol=2e-2, rtol=2e-2)


def test_options_the_reference_lacks_are_refused():
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(NotImplementedError, match="rotary_cos"):
        kernels.flash_attn_with_kvcache(q, q, q, rotary_cos=torch.ones(1))
    with pytest.raises(NotImplementedError, match="softcap"):
        kernels.flash_attn_with_kvcache(q, q, q, softcap=1.5)


def test_install_keeps_a_flash_attn_that_is_there(monkeypatch):
    marker = object()
    monkeypatch.setitem(sys.modules, "flash_attn", marker)
    kernels.install()
    assert sys.modules["flash_attn"] is marker
