"""Micro-batches in, token scores out: how the model is called for scoring and for training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from .logprobs import TokenScores, token_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """What a forward pass computes per token."""

    temperature: float
    with_entropy: bool = False


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def logits_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """[b, T] ids -> [b, T, V / tp] logits of the next token (a middle pipeline stage: its hidden states).

    Rows are padded on the right, so causal attention needs no other mask.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(input_ids=tokens, position_ids=positions, attention_mask=None)


def scores_of_tokens(logits: Tensor, tokens: Tensor, scoring: Scoring) -> TokenScores:
    """Scores aligned with `tokens` [b, T]: entry t is about token t, given those before it; entry 0 is 0.

    The entropy at t is that of the distribution token t was drawn from.
    """
    scores = token_scores(
        logits,
        tokens.roll(-1, 1),  # position t predicts token t + 1; the last one predicts nothing and is cut below
        temperature=scoring.temperature,
        with_entropy=scoring.with_entropy,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    entropy = None if scores.entropy is None else _shift_right(scores.entropy)
    return TokenScores(logprobs=_shift_right(scores.logprobs), entropy=entropy)


def _shift_right(per_position: Tensor) -> Tensor:
    return torch.nn.functional.pad(per_position[:, :-1], (1, 0))
