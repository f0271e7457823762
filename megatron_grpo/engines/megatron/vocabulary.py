"""The vocabulary as the model sees it: padded to equal shards, with padded ids switched off.

One mechanism for sampling and loss: a hook on the output layer sets the logits of ids that no tokenizer has to -inf,
so that every reader of the logits gives them probability 0.
"""

from __future__ import annotations

import math

import torch
from megatron.core.utils import get_pg_rank

ROWS_PER_RANK_MULTIPLE = 8


def padded_vocab_size(vocab_size: int, *tensor_parallel_sizes: int) -> int:
    """`vocab_size` rounded up to a multiple of 8 x the least common multiple of the tensor-parallel sizes.

    Name those of the trainer and of the engine: weights can only move between models of one padded size.
    E.g. 47 ids, sizes 2 and 1 -> 48; sizes 4 and 2 -> 64.
    """
    multiple = math.lcm(*tensor_parallel_sizes) * ROWS_PER_RANK_MULTIPLE
    return -(-vocab_size // multiple) * multiple


def mask_padded_ids(output_layer: torch.nn.Module, vocab_size: int, padded_size: int) -> None:
    """Make `output_layer` answer -inf for ids >= `vocab_size`, for gathered logits and for a rank's shard alike."""
    if padded_size == vocab_size:
        return

    def switch_off(layer, inputs, outputs):
        logits, bias = outputs
        width = logits.shape[-1]
        first_id = 0 if width == padded_size else get_pg_rank(layer.tp_group) * width
        num_real = min(max(vocab_size - first_id, 0), width)
        if num_real < width:
            logits[..., num_real:] = float("-inf")
        return logits, bias

    output_layer.register_forward_hook(switch_off)
