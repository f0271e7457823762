"""The vocabulary as the model sees it: padded to equal shards, with padded ids switched off.

One mechanism for sampling and loss: a hook on the output layer sets the logits of ids that no tokenizer has to -inf,
so that every reader of the logits gives them probability 0.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state

ROWS_PER_RANK_MULTIPLE = 8


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """`vocab_size` rounded up to a multiple of tp x 8.  E.g. 47 ids, tp 2 -> 48; tp 4 -> 64."""
    multiple = tp * ROWS_PER_RANK_MULTIPLE
    return -(-vocab_size // multiple) * multiple


def mask_padded_ids(output_layer: torch.nn.Module, vocab_size: int, padded_size: int) -> None:
    """Make `output_layer` answer -inf for ids >= `vocab_size`, for gathered logits and for a rank's shard alike."""
    if padded_size == vocab_size:
        return

    def switch_off(layer, inputs, outputs):
        logits, bias = outputs
        width = logits.shape[-1]
        first_id = 0 if width == padded_size else parallel_state.get_tensor_model_parallel_rank() * width
        num_real = min(max(vocab_size - first_id, 0), width)
        if num_real < width:
            logits[..., num_real:] = float("-inf")
        return logits, bias

    output_layer.register_forward_hook(switch_off)
