"""Tokens per second of the generation engine on a CPU with the batched attention reference and with a loop over rows.

    python benchmarks/attention.py [num_requests ...]

Short requests (prompts of 14 tokens, 8 new ones) on a random model of 2 layers and width 64, in one process and one
thread; the two attentions take turns so that load on the machine hits both. Wanted at 256 requests: at least 2.5x the
loop's tokens per second, attention under 30% of the time.
"""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_grpo.config.schema import Recipe
from megatron_grpo.layout import Gpu, Sizes, build_world
from megatron_grpo.platform import kernels
from megatron_grpo.platform.device import CPU
from megatron_grpo.types import Sampling

PROMPT_TOKENS, NEW_TOKENS, VOCAB = 14, 8, 63
ROUNDS = 7


@dataclass(kw_only=True)
class Clock:
    seconds: float = 0.0

    def timed(self, function: Callable) -> Callable:
        def call(*args, **options):
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def row_attention(q, k, v, scale, causal):
    """q [lq, H, D], k and v [lk, Hk, D]; causal queries end at the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def row_keys(cache, table, length):
    pages = table[: -(-length // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[:length]


def loop_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *, softmax_scale, causal, block_table, **unused
):
    out = torch.zeros_like(q)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row in range(len(q_ends) - 1):
        mine, length = slice(q_ends[row], q_ends[row + 1]), k_ends[row + 1] - k_ends[row]
        if mine.stop > mine.start and length:
            keys, values = (row_keys(cache, block_table[row], length) for cache in (k, v))
            out[mine] = row_attention(q[mine], keys, values, softmax_scale, causal)
    return out


def loop_decode(q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, block_table, **unused):
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            keys, values = (row_keys(cache, block_table[row], length) for cache in (k_cache, v_cache))
            out[row] = row_attention(q[row], keys, values, softmax_scale, causal)
    return out


def recipe(num_requests: int) -> Recipe:
    return Recipe.model_validate(
        {
            "grpo": {"num_prompts_per_step": num_requests, "num_generations_per_prompt": 1},
            "policy": {
                "precision": "float32",
                "max_total_sequence_length": 64,
                "model_config": {
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "head_dim": 16,
                },
                "generation": {
                    "mcore_generation_config": {"block_size_tokens": 16, "max_tokens": 8192, "buffer_size_gb": 0.5}
                },
            },
        }
    )


def build_engine(num_requests: int):
    CPU.prepare()
    from megatron_grpo.engines.megatron.inference import MegatronGeneration
    from megatron_grpo.engines.megatron.model import build_model
    from megatron_grpo.engines.megatron.parallel import init_world

    config, world = recipe(num_requests), build_world([Gpu(node=0, gpu=0)], Sizes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_world(world, 0, "127.0.0.1", port, CPU, 60.0)
    module = build_model(config, world, VOCAB, CPU)
    return MegatronGeneration(module, config, world, 0, vocab_size=VOCAB, eos_id=VOCAB - 1)


async def tokens_of(engine, num_requests: int, round_index: int) -> int:
    draw = random.Random(round_index)
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    answers = await asyncio.gather(
        *(
            engine.generate(
                [draw.randrange(VOCAB - 1) for _ in range(PROMPT_TOKENS)],
                num_generations=1,
                sampling=sampling,
                request_id=f"{round_index}/{index}",
            )
            for index in range(num_requests)
        )
    )
    return sum(len(completion.token_ids) for group in answers for completion in group)


def measure(engine, num_requests: int, functions: dict[str, tuple[Callable, Callable]]) -> None:
    from megatron.core.transformer import attention

    rates: dict[str, list[float]] = {name: [] for name in functions}
    shares: dict[str, list[float]] = {name: [] for name in functions}
    for round_index in range(ROUNDS + 1):
        for name, (varlen, decode) in functions.items():
            clock = Clock()
            attention.flash_attn_varlen_func, attention.flash_attn_with_kvcache = map(clock.timed, (varlen, decode))
            begin = time.perf_counter()
            num_tokens = asyncio.run(tokens_of(engine, num_requests, round_index))
            seconds = time.perf_counter() - begin
            if round_index:  # the first round warms up
                rates[name].append(num_tokens / seconds)
                shares[name].append(clock.seconds / seconds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        share = statistics.median(shares[name])
        print(f"{num_requests:5d} requests  {name:8s} {rate:8.0f} tokens/s  attention {share:4.0%} of the time")
    batched, loop = medians.values()
    print(f"{num_requests:5d} requests  ratio    {batched / loop:8.2f}")


def main() -> None:
    torch.set_num_threads(1)
    counts = [int(argument) for argument in sys.argv[1:]] or [8, 64, 256]
    engine = build_engine(max(counts))
    functions = {
        "batched": (kernels.flash_attn_varlen_func, kernels.flash_attn_with_kvcache),
        "loop": (loop_varlen, loop_decode),
    }
    for num_requests in counts:
        measure(engine, num_requests, functions)
    engine.close()


if __name__ == "__main__":
    main()
