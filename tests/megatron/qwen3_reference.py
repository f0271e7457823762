"""Run as a script, in a process of its own: transformers' Qwen3 on random weights.

    python qwen3_reference.py DIRECTORY OUTPUT.npz [--adapter]

Saves the model into DIRECTORY when it is not there, loads it with `from_pretrained` and writes logits, log-probs of the
tokens, the gradient of their mean, rotary frequencies and the weights. With --adapter the CPU adapter of Megatron is
installed first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

CONFIG = {
    "vocab_size": 47,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
ROPE_THETA = 10000.0


def sample_tokens() -> torch.Tensor:
    return torch.randint(0, CONFIG["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--adapter", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.adapter:
        from megatron_grpo.platform.device import CPU

        CPU.prepare()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if not arguments.directory.exists():
        torch.manual_seed(0)
        fresh = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape))  # norms of 1 hide a swap of norms
        fresh.save_pretrained(arguments.directory)
    model = Qwen3ForCausalLM.from_pretrained(arguments.directory, dtype=torch.float32, attn_implementation="eager")
    tokens = sample_tokens()
    logits = model(tokens).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    (-logprobs.mean()).backward()
    np.savez(
        arguments.output,
        logits=logits.detach().numpy(),
        logprobs=logprobs.detach().numpy(),
        inv_freq=model.model.rotary_emb.inv_freq.numpy(),
        **{f"weight.{name}": parameter.detach().numpy() for name, parameter in model.named_parameters()},
        **{f"gradient.{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()},
    )


if __name__ == "__main__":
    main()
