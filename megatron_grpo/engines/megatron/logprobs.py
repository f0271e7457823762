"""Log-probs and entropies of tokens from vocabulary-parallel logits, without gathering the vocabulary.

Each tensor-parallel rank holds the logits z of V/tp ids. With x = z / temperature, m = max over all ids, and sums over
all ids (two small all-reduces: one maximum, one sum of three numbers per token)

    S = sum exp(x - m)      log Z = m + log S      log p(i) = x_i - log Z      H = log S - sum exp(x - m) (x - m) / S

Gradients towards the rank's own logits: d log p(i) / dz_j = ([i = j] - p_j) / T,  dH / dz_j = -p_j (log p_j + H) / T.
Ids at -inf (padding of the vocabulary) have probability 0, contribute nothing and get gradient 0.

Memory: nothing of vocabulary size is kept besides the logits themselves; the backward pass makes their gradient, the
only other such buffer. Everything else is computed in runs of rows of `CHUNK_ELEMENTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
LOWEST_LOGPROB = -1e4  # exp of it is 0 as exp(-inf) is, but 0 x -1e4 is 0 where 0 x -inf is NaN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """float32 [b, s] each; `entropy` None: not asked for."""

    logprobs: Tensor
    entropy: Tensor | None


def token_scores(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """log p(target) at each position, and the entropy of the distribution when asked for.

    `logits` [b, s, V / tp] is this rank's shard, ids in rank order; `targets` [b, s] are global ids. Both results are
    the same on every rank of `tp_group` (None: one rank). Differentiable in `logits`.
    """
    logprobs, entropy = _VocabParallelScores.apply(logits, targets, temperature, with_entropy, tp_group)
    return TokenScores(logprobs=logprobs, entropy=entropy if with_entropy else None)


class _VocabParallelScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, with_entropy, tp_group):
        rows, ids = logits.flatten(0, -2), targets.flatten()
        shard = _Shard.of(rows.shape[1], ids, tp_group)
        maximum = _all_reduce(rows.amax(1).to(_wide(rows.dtype)) / temperature, dist.ReduceOp.MAX, tp_group)
        parts = [_sums(rows[run], maximum[run], shard, run, temperature, with_entropy) for run in _runs(rows)]
        exp_sum, target, weighted = _all_reduce(torch.cat(parts, 1), dist.ReduceOp.SUM, tp_group)
        log_sum = exp_sum.log()
        log_z, entropy = maximum + log_sum, log_sum - weighted / exp_sum
        ctx.save_for_backward(logits, log_z, entropy)
        ctx.shard, ctx.temperature, ctx.with_entropy = shard, temperature, with_entropy
        return (target - log_z).view(targets.shape), entropy.view(targets.shape)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, log_z, entropy = ctx.saved_tensors
        rows = logits.flatten(0, -2)
        gradient = torch.empty_like(rows, memory_format=torch.contiguous_format)
        by_logprob = grad_logprobs.flatten() / ctx.temperature
        by_entropy = grad_entropy.flatten() / ctx.temperature if ctx.with_entropy else None
        for run in _runs(rows):
            logp = (rows[run].to(log_z.dtype) / ctx.temperature).sub_(log_z[run, None])
            logp.clamp_(min=LOWEST_LOGPROB)
            weight = -by_logprob[run, None]
            if by_entropy is not None:
                weight = weight - by_entropy[run, None] * (logp + entropy[run, None])
            part = logp.exp_().mul_(weight) if by_entropy is None else logp.exp() * weight
            owned = ctx.shard.owned[run]
            part.scatter_add_(1, ctx.shard.local[run, None], torch.where(owned, by_logprob[run], 0.0)[:, None])
            gradient[run] = part
        return gradient.view(logits.shape), None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """Which targets this rank's run of ids holds, and where: `local` is a valid column even where not owned."""

    local: Tensor
    owned: Tensor

    @classmethod
    def of(cls, width: int, ids: Tensor, tp_group: dist.ProcessGroup | None) -> _Shard:
        first = 0 if tp_group is None else tp_group.rank() * width
        local = ids - first
        return cls(local.clamp(0, width - 1), (local >= 0) & (local < width))


def _sums(rows, maximum, shard: _Shard, run: slice, temperature: float, with_entropy: bool) -> Tensor:
    """This rank's part of [sum exp(x - m), x at the target, sum exp(x - m) (x - m)]: [3, rows]."""
    shifted = (rows.to(maximum.dtype) / temperature).sub_(maximum[:, None])
    at_target = shifted.gather(1, shard.local[run, None])[:, 0] + maximum
    at_target = torch.where(shard.owned[run], at_target, 0.0)
    if not with_entropy:
        exp_sum = shifted.exp_().sum(1)
        return torch.stack([exp_sum, at_target, torch.zeros_like(exp_sum)])
    weights = shifted.exp()
    return torch.stack([weights.sum(1), at_target, torch.special.xlogy(weights, weights).sum(1)])


def _runs(rows: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // rows.shape[1])
    return [slice(start, start + size) for start in range(0, rows.shape[0], size)]


def _all_reduce(values: Tensor, op: dist.ReduceOp, tp_group: dist.ProcessGroup | None) -> Tensor:
    if tp_group is not None and tp_group.size() > 1:
        dist.all_reduce(values, op=op, group=tp_group)
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
