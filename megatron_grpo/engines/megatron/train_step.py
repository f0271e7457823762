"""Runs Megatron's forward-backward schedule over the micro-batches of one rank: scoring, GRPO updates, supervised ones.

Every loss is a local sum divided by a GLOBAL count, and gradients are summed over micro-batches and ranks. So the
gradient is the same for every cut into micro-batches and every number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.inference.utils import InferenceMode
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ...algorithms.loss import LossConfig, LossInputs, LossSums, Normalizer, grpo_loss
from ...types import RolloutBatch, SupervisedBatch, TrainBatch
from .forward import Scoring, logits_of, on_device, scores_of_tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch[Batch]:
    """One forward pass: ids on the device and what the loss needs besides."""

    tokens: Tensor  # int64 [b, T]
    batch: Batch


Model = Sequence[DistributedDataParallel]
"""The chunks of this rank, each wrapped; one where the pipeline is not interleaved."""


def connect_schedule(model: Model) -> None:
    """Tell Megatron's schedules how the gradients of `model` are completed after the last micro-batch."""

    def finish(chunks: list, num_tokens: Tensor | None = None, **groups: Any) -> None:
        # no token count: Megatron would divide by it, and the loss is divided already
        finalize_model_grads(chunks, None, **groups)

    # the schedules read these of the first chunk, for all
    model[0].config.finalize_model_grads_func = finish
    model[0].config.no_sync_func = model[0].no_sync if len(model) == 1 else [chunk.no_sync for chunk in model]


def score_micro_batches(
    model: Model, batches: Sequence[RolloutBatch], temperature: float, device: torch.device
) -> list[np.ndarray]:
    """Log-probs [b, t] of every micro-batch in order, aligned with its tokens; 0 at t = 0 and at padding.

    Empty on pipeline stages without the output layer.
    """
    scoring = Scoring(temperature=temperature)

    def collect(micro: MicroBatch[RolloutBatch], logits: Tensor) -> np.ndarray:
        logprobs = scores_of_tokens(logits, micro.tokens, scoring).logprobs.cpu().numpy()
        columns = np.arange(logprobs.shape[1])
        return np.where(columns < micro.batch.lengths[:, None], logprobs, 0.0).astype(np.float32)

    with torch.no_grad():
        return _run(model, [_on_device(batch.tokens, batch, device) for batch in batches], collect, forward_only=True)


def grpo_gradients(
    model: Model,
    batches: Sequence[TrainBatch],
    config: LossConfig,
    temperature: float,
    device: torch.device,
) -> LossSums | None:
    """Add the gradient of one update (its micro-batches on this rank) to the gradient buffer.

    Returns this rank's metric sums; None on pipeline stages without the output layer.
    """
    scoring = Scoring(temperature=temperature, with_entropy=config.uses_entropy)

    def loss_of(micro: MicroBatch[TrainBatch], logits: Tensor) -> tuple[Tensor, LossSums]:
        scores = scores_of_tokens(logits, micro.tokens, scoring)
        normalizer = Normalizer(num_tokens=micro.batch.num_valid_tokens, num_sequences=micro.batch.num_valid_sequences)
        inputs = _loss_inputs(micro.batch, scores.logprobs, scores.entropy, device)
        output = grpo_loss(config, inputs, normalizer)
        return output.loss, output.sums

    micro = [_on_device(batch.scored.rollouts.tokens, batch, device) for batch in batches]
    sums = _run(model, micro, loss_of, forward_only=False)
    return sum(sums[1:], sums[0]) if sums else None


def supervised_gradients(
    model: Model, batches: Sequence[SupervisedBatch], num_tokens: int, device: torch.device
) -> Tensor | None:
    """Add the gradient of the cross-entropy per token to the buffer; returns this rank's share of it (None: see above).

    `num_tokens` counts the masked tokens of the whole batch over all ranks.
    """
    scoring = Scoring(temperature=1.0)

    def loss_of(micro: MicroBatch[SupervisedBatch], logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = scores_of_tokens(logits, micro.tokens, scoring).logprobs
        loss = -torch.where(on_device(micro.batch.loss_mask, device), logprobs, 0.0).sum() / num_tokens
        return loss, loss.detach()

    micro = [_on_device(batch.tokens, batch, device) for batch in batches]
    losses = _run(model, micro, loss_of, forward_only=False)
    return torch.stack(losses).sum() if losses else None


def _run[Batch](
    model: Model,
    micro_batches: Sequence[MicroBatch[Batch]],
    evaluate: Callable[[MicroBatch[Batch], Tensor], Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """`evaluate(micro_batch, logits)` for each micro-batch, with a backward pass unless `forward_only`.

    Training: `evaluate` returns (loss, kept). Returns what was kept (or the answers) in order; empty where the
    pipeline stage has no output layer.
    """
    assert not InferenceMode.is_active(), "the engine must sleep (or enter_training be called) before the model trains"

    def forward_step(micro_batches, stage):
        micro = next(micro_batches)

        def finish(logits: Tensor, non_loss_data: bool = False):
            if non_loss_data:
                return evaluate(micro, logits)
            loss, kept = evaluate(micro, logits)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), kept

        return logits_of(stage, micro.tokens), finish

    iterators = [iter(micro_batches) for _ in model]  # every chunk of an interleaved pipeline reads all of them
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=list(model),
        num_microbatches=len(micro_batches),
        seq_length=max(micro.tokens.shape[1] for micro in micro_batches),
        micro_batch_size=max(micro.tokens.shape[0] for micro in micro_batches),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _on_device[Batch](tokens: np.ndarray, batch: Batch, device: torch.device) -> MicroBatch[Batch]:
    return MicroBatch(tokens=on_device(tokens, device), batch=batch)


def _loss_inputs(batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, device: torch.device) -> LossInputs:
    scored, rollouts = batch.scored, batch.scored.rollouts
    reference = scored.reference_logprobs
    return LossInputs(
        current_logprobs=logprobs,
        entropy=entropy,
        old_logprobs=on_device(scored.old_logprobs, device),
        generation_logprobs=on_device(rollouts.generation_logprobs, device),
        reference_logprobs=None if reference is None else on_device(reference, device),
        advantages=on_device(batch.advantages, device),
        token_mask=on_device(rollouts.loss_mask, device),
        sample_mask=on_device(rollouts.sample_mask, device),
    )
