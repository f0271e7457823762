"""What the objective of one micro-batch is computed from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .sequences import PackedSequences, RowSequences, Sequences


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """One micro-batch. All [B, T] arrays are aligned with each other, whatever the alignment.

    Only `current_logprobs` and `entropy` carry gradients. Packed rows give `segment_ids` and per-token advantages and
    sample masks.
    """

    current_logprobs: Tensor  # [B, T]
    old_logprobs: Tensor  # [B, T]
    generation_logprobs: Tensor  # [B, T]
    reference_logprobs: Tensor | None = None  # [B, T]; None: the KL weight is 0
    advantages: Tensor  # [B] or [B, T]
    token_mask: Tensor  # [B, T] bool or 0/1
    sample_mask: Tensor  # [B] or [B, T] bool or 0/1
    entropy: Tensor | None = None  # [B, T] of the policy's distribution; None: the entropy weight is 0
    segment_ids: Tensor | None = None  # int64 [B, T], see `PackedSequences`; None: one sequence per row

    def __post_init__(self) -> None:
        shape = self.current_logprobs.shape
        for array in (self.old_logprobs, self.generation_logprobs, self.reference_logprobs, self.entropy):
            assert array is None or array.shape == shape, f"{tuple(array.shape)} is not aligned with {tuple(shape)}"
        assert self.token_mask.shape == shape, f"token_mask {tuple(self.token_mask.shape)} against {tuple(shape)}"

    @property
    def valid(self) -> Tensor:
        """Tokens that train: bool [B, T]."""
        return self.token_mask.bool() & _per_token(self.sample_mask).bool()

    @property
    def token_advantages(self) -> Tensor:
        """Broadcastable to [B, T]."""
        return _per_token(self.advantages)

    @property
    def sequences(self) -> Sequences:
        return RowSequences() if self.segment_ids is None else PackedSequences(self.segment_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalizer:
    """Valid tokens, and sequences with at least one, of the whole update over all micro-batches and ranks."""

    num_tokens: int
    num_sequences: int


def _per_token(x: Tensor) -> Tensor:
    return x.unsqueeze(-1) if x.ndim == 1 else x
