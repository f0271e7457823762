"""What the tests of the generation engine share: a small model, its recipe, and answers computed without an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron_grpo.config.schema import Recipe
from tests.megatron.world import Seat

VOCAB = 43  # not a multiple of 8: the model pads it
EOS = 42


def recipe(
    *, tp: int = 1, sequence_parallel: bool = False, seed: int = 7, timeout_s: float = 20.0, **engine: Any
) -> Recipe:
    settings = {"max_model_len": 96, "buffer_size_gb": 0.05, "block_size_tokens": 16, "max_tokens": 512, **engine}
    return Recipe.model_validate(
        {
            "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 8, "seed": seed},
            "policy": {
                "precision": "float32",
                "max_total_sequence_length": 96,
                "model_config": {
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                },
                "megatron_cfg": {
                    "tensor_model_parallel_size": tp,
                    "sequence_parallel": sequence_parallel,
                    "pipeline_dtype": "float32",
                },
                "generation": {"mcore_generation_config": settings},
            },
            "timeouts": {"refit": timeout_s, "group": 30.0},
        }
    )


def build_module(seat: Seat, config: Recipe, *, sharpen: float = 8.0):
    """A rank's model. `sharpen` scales the output layer so that the best token stands out from rounding."""
    from megatron_grpo.engines.megatron.model import build_model

    seat.join()
    module = build_model(config, seat.world, VOCAB, seat.accelerator)
    with torch.no_grad():
        module.output_layer.weight.mul_(sharpen)
    return module.eval()


def build_engine(seat: Seat, config: Recipe, *, eos_id: int = EOS, **model: Any):
    """`eos_id=VOCAB` names a padding row, which is never sampled: every request runs to its last token."""
    from megatron_grpo.engines.megatron.inference import MegatronGeneration

    module = build_module(seat, config, **model)
    engine = MegatronGeneration(module, config, seat.world, seat.rank, vocab_size=VOCAB, eos_id=eos_id)
    return module, engine


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """A plain forward of a module whose engine is idle: the engine's constructor switches the process to its mode."""
    from megatron.core.inference.utils import InferenceMode

    was_active = InferenceMode.is_active()
    InferenceMode.unset_active()
    try:
        yield
    finally:
        if was_active:
            InferenceMode.set_active()


def full_logits(module, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of the whole sequence without a cache; every rank of a tensor-parallel group calls it."""
    multiple = module.config.tensor_model_parallel_size if module.config.sequence_parallel else 1
    length = -(-len(tokens) // multiple) * multiple
    ids = torch.tensor([list(tokens) + [0] * (length - len(tokens))])
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad(), outside_inference():
        logits = module(ids, torch.arange(length)[None], mask, runtime_gather_output=True)
    return logits[0, : len(tokens), :VOCAB].float()


def reference_logprobs(module, prompt: Sequence[int], generated: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    logits = full_logits(module, [*prompt, *generated]) / temperature
    return chosen_logprobs(logits, prompt, generated)


def chosen_logprobs(logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """Log-probs of the generated tokens from the logits [T, V] of the whole sequence."""
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.as_tensor(np.asarray(generated), dtype=torch.long)[:, None])[:, 0].numpy()


def greedy_loop(module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens by a full forward for each; ends with EOS as the engine does."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(full_logits(module, tokens)[-1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]  # per attention layer, [T, 1, heads, dim] each


def logits_with_old_keys(
    module, tokens: Sequence[int], old: KeysAndValues, num_old: int
) -> tuple[torch.Tensor, KeysAndValues]:
    """`full_logits` with the keys and values of the first `num_old` positions replaced; also those then in use."""
    used: KeysAndValues = []

    def replace(layer, args, kwargs):
        query, key, value, *rest = args
        if num_old:
            old_key, old_value = old[len(used)]
            key = torch.cat((old_key[:num_old], key[num_old:]))
            value = torch.cat((old_value[:num_old], value[num_old:]))
        used.append((key, value))
        return (query, key, value, *rest), kwargs

    attention = [layer for name, layer in module.named_modules() if name.endswith(".core_attention")]
    hooks = [layer.register_forward_pre_hook(replace, with_kwargs=True) for layer in attention]
    try:
        logits = full_logits(module, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(used) == len(attention) > 0
    return logits, used
