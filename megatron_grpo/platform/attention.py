"""Attention over ragged batches and paged key/value caches in plain torch.

Owns the arithmetic behind the two flash-attn entry points that Megatron's dynamic engine calls (see `kernels`); knows
nothing of Megatron. Work is done per bucket of rows with similar lengths, never per row: an engine step has hundreds
of rows with one query each, and a Python loop over them costs more than the model.

Convention of flash-attn for unequal lengths (causal): the last query sees the last key, so query i of a row with
lq queries and lk keys sees key j when j <= i + lk - lq. Example: lq 1, lk 5 (decode) sees all five keys.
A query that sees no key gives zeros and a log-sum-exp of -inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Padding a bucket to its longest row may cost this many times the real work before rows are split by length.
MAX_PADDING = 2.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """Where the keys and values of each row lie: row b's key j is `flat[table[b, j // page] * page + j % page]`."""

    keys: Tensor  # [N, Hk, D]
    values: Tensor  # [N, Hk, D]
    table: Tensor  # int64 [B, pages]; entries past a row's end are ignored
    page: int

    @classmethod
    def paged(cls, keys: Tensor, values: Tensor, table: Tensor) -> Keys:
        """Keys of shape [blocks, page, Hk, D], addressed by a block table [B, pages]."""
        return cls(keys=keys.flatten(0, 1), values=values.flatten(0, 1), table=table.long(), page=keys.shape[1])

    @classmethod
    def packed(cls, keys: Tensor, values: Tensor, starts: Tensor) -> Keys:
        """Keys of shape [total, Hk, D]; row b begins at `starts[b]`. A page of one key, read contiguously."""
        return cls(keys=keys, values=values, table=starts.long()[:, None], page=0)

    def gather(self, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given rows (of `lengths` > 0), [b, longest, Hk, D].

        A short row is filled up with its own last key: a cache is uninitialised memory beyond a row's end, and a NaN
        there would survive its weight of zero.
        """
        longest = int(lengths.max())
        position = torch.arange(longest, device=self.keys.device).minimum(lengths[:, None] - 1)
        if self.page:
            pages = self.table[rows].gather(1, position // self.page)
            index = pages * self.page + position % self.page
        else:
            index = self.table[rows] + position
        index = index.flatten()
        shape = (len(rows), longest, *self.keys.shape[1:])
        return self.keys.index_select(0, index).view(shape), self.values.index_select(0, index).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Which keys a query sees and how scores are scaled. `window` counts keys to the left and right; -1 is no limit."""

    scale: float
    causal: bool
    window: tuple[int, int] = (-1, -1)

    @property
    def right(self) -> int:
        return 0 if self.causal else self.window[1]

    def visible(self, q_lengths: Tensor, k_lengths: Tensor, max_q: int, max_k: int) -> Tensor:
        """Bool [b, max_q, max_k] for rows of the given lengths."""
        key = torch.arange(max_k, device=k_lengths.device)
        seen = (key < k_lengths[:, None])[:, None, :]
        if max_q == 1 and self.window == (-1, -1) and self.right <= 0:
            return seen
        diagonal = torch.arange(max_q, device=k_lengths.device) + (k_lengths - q_lengths)[:, None]
        if self.right >= 0:
            seen = seen & (key <= diagonal[..., None] + self.right)
        if self.window[0] >= 0:
            seen = seen & (key >= diagonal[..., None] - self.window[0])
        return seen.expand(-1, max_q, -1)


def ragged_attention(
    q: Tensor, q_starts: Tensor, q_lengths: Tensor, keys: Keys, k_lengths: Tensor, rule: Rule, *, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of `q` [total, H, D] (row b: `q_lengths[b]` queries from `q_starts[b]`) over `keys`.

    Returns the output [total, H, D] and, when asked, the log-sum-exp [total, H] in float32. H is a multiple of Hk
    (grouped queries: head h reads key head h // (H / Hk)).
    """
    total, heads, dim = q.shape
    out = torch.zeros_like(q)
    lse = q.new_full((total, heads), float("-inf"), dtype=torch.float32) if need_lse else None
    q_lengths, k_lengths = q_lengths.long(), k_lengths.long()
    for rows in _buckets(q_lengths, k_lengths):
        lq, lk = q_lengths[rows], k_lengths[rows]
        max_q = int(lq.max())
        offset = torch.arange(max_q, device=q.device)
        index = q_starts[rows][:, None] + offset
        query = q.index_select(0, index.clamp(max=total - 1).flatten()).view(len(rows), max_q, heads, dim)
        k, v = keys.gather(rows, lk)
        seen = rule.visible(lq, lk, max_q, k.shape[1])
        block, block_lse = _attend(query, k, v, seen, rule.scale, need_lse=need_lse)
        real = offset < lq[:, None]
        out[index[real]] = block[real]
        if lse is not None:
            lse[index[real]] = block_lse[real]
    return out, lse


def _buckets(q_lengths: Tensor, k_lengths: Tensor) -> Iterator[Tensor]:
    """Rows with work, split by length class (powers of two) where one rectangle would mostly hold padding."""
    rows = ((q_lengths > 0) & (k_lengths > 0)).nonzero().flatten()
    if not len(rows):
        return
    lq, lk = q_lengths[rows], k_lengths[rows]
    real, padded = int((lq * lk).sum()), len(rows) * int(lq.max()) * int(lk.max())
    if padded <= MAX_PADDING * real:
        yield rows
        return
    kind = _length_class(lq) * 64 + _length_class(lk)
    for value in kind.unique():
        yield rows[kind == value]


def _length_class(lengths: Tensor) -> Tensor:
    """ceil(log2(length)): 1 -> 0, 2 -> 1, 3..4 -> 2, 5..8 -> 3."""
    return torch.frexp((lengths - 1).double() + 0.5)[1]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, *, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Rectangular attention: q [b, Q, H, D], k and v [b, K, Hk, D], seen [b, Q, K] -> [b, Q, H, D], [b, Q, H]."""
    b, num_q, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Query heads that share a key head become further queries of that head: no key is copied for grouped queries.
    folded = q.view(b, num_q, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(b, kv_heads, num_q * group, dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # A softmax of nothing is NaN: queries without a key see everything here, and their result is dropped below.
    blind = ~seen.any(-1)
    mask = (seen | blind[..., None])[:, None, :, None, :]
    mask = mask.expand(b, 1, num_q, group, -1).reshape(b, 1, num_q * group, -1)
    lse = None
    if need_lse:
        scores = (folded.float() @ k.float().transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
        lse = torch.logsumexp(scores, -1).view(b, kv_heads, num_q, group).permute(0, 2, 1, 3).reshape(b, num_q, heads)
        lse = lse.masked_fill(blind[..., None], float("-inf"))
        out = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    else:
        out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(b, kv_heads, num_q, group, dim).permute(0, 2, 1, 3, 4).reshape(b, num_q, heads, dim)
    return out.masked_fill(blind[..., None, None], 0.0), lse
