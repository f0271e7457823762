"""Sampling whose log-probs are those of the distribution sampled from, and whose draws depend on nothing but the
request.

Every request carries a stream id; its n-th token is drawn from hash(stream, n) by inverting the cumulative
distribution. So the tokens do not depend on which requests share a step, on arrival order or on the replica, and all
tensor-parallel ranks agree: a synchronous run repeats itself. (One generator for all rows, as Megatron keeps it,
makes every sample depend on the timing of all others.)
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor


def stream_id(seed: int, version: int, request_id: str, index: int) -> int:
    """The stream of completion `index` of a request made under weight version `version`; 63 bits."""
    text = f"{seed}/{version}/{index}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def carry_stream(params: SamplingParams, stream: int) -> None:
    """Give a request its stream; the attribute travels with the parameters to every rank."""
    params.add_attributes({"draw_stream": stream})


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each (stream, position); the finaliser of splitmix64 (Steele et al. 2014).

    40 bits, so that the product with a cumulative sum just below or above 1 stays below that sum.
    """
    z = streams.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(24)).astype(np.float64) * 2.0**-40


def sampling_logprobs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Log-probs [n, V] of what is sampled: logits / temperature, then the top k, then the smallest set whose mass
    within those reaches top p. Filtered tokens get -inf. `top_k` 0 and `top_p` 0 (Megatron's "off") filter nothing.
    """
    scaled = logits.float() / temperature[:, None]
    rows = ((top_k > 0) | ((top_p > 0) & (top_p < 1))).nonzero().flatten()
    if len(rows):
        scaled[rows] = _filtered(scaled[rows], top_k[rows], top_p[rows])
    return torch.log_softmax(scaled, dim=-1)


def _filtered(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside_k = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = ordered.masked_fill(outside_k, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the better tokens: the one that crosses top p is still kept
    outside_p = (top_p[:, None] > 0) & (before >= top_p[:, None])
    dropped = torch.zeros_like(outside_k).scatter(-1, order, outside_k | outside_p)
    return logits.masked_fill(dropped, float("-inf"))


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens int64 [n]: the first whose cumulative probability exceeds `uniform` (float64 [n]). Never one of mass 0."""
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).flatten()


class StreamSampling(Sampling):
    """Megatron's sampling backend for an engine whose requests all went through `carry_stream`.

    Greedy is `top_k` 1: its tokens are the argmax and its log-probs those of temperature 1 without filters (the greedy
    distribution itself says only 0).
    """

    def __init__(self, engine: DynamicInferenceEngine):
        self._engine = engine
        self._logprobs: Tensor | None = None  # of the step being sampled

    def sample_kernel(
        self,
        logits: Tensor,
        n: int,
        context: DynamicInferenceContext,
        *,
        no_top_k: bool,
        no_top_p: bool,
        gather_indices: Tensor | None = None,
        token_to_request_index: Tensor | None = None,
        output: Tensor | None = None,
        eager: bool = False,
        cache_key: Any = None,
    ) -> Tensor:
        """Sample one token for each of the first `n` rows. See the base class."""
        assert token_to_request_index is None, "speculative decoding is not supported"
        logits = logits[:n] if gather_indices is None else logits[gather_indices[:n]]
        settings = context.active_request_metadata
        temperature, top_k, top_p = (
            settings[name][:n].to(logits.device) for name in ("temperature", "top_k", "top_p")
        )
        greedy = top_k == 1
        filters = () if no_top_k and no_top_p else (top_k.masked_fill(greedy, 0), top_p.masked_fill(greedy, 0.0))
        off = torch.zeros_like(top_k)
        self._logprobs = sampling_logprobs(logits, temperature.masked_fill(greedy, 1.0), *(filters or (off, off)))
        uniform = torch.from_numpy(self._uniforms(context, n)).to(logits.device)
        tokens = draw(self._logprobs, uniform)
        if not no_top_k:
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
        return tokens if output is None else output.copy_(tokens)

    def _uniforms(self, context: DynamicInferenceContext, n: int) -> np.ndarray:
        active = slice(context.paused_request_count, context.total_request_count)
        requests = self._engine.requests
        # The first entry of a record: an evicted request starts over with a copy that lacks unknown attributes.
        streams = [requests[i].record[0].sampling_params.draw_stream for i in context.request_ids[active].tolist()]
        return uniforms(np.asarray(streams), context.get_active_sequence_lengths().numpy())[:n]

    def log_probs_kernel(
        self, logits: Tensor, context: DynamicInferenceContext, *, token_to_request_index: Tensor | None = None
    ) -> Tensor:
        """Log-probs [n, V] of the step just sampled."""
        assert self._logprobs is not None and token_to_request_index is None, "only generated tokens have log-probs"
        assert self._logprobs.shape == logits.shape, f"{logits.shape} after sampling {self._logprobs.shape}"
        return self._logprobs
