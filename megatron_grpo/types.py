"""What flows between the parts: frozen records. A stage returns a new type; no field is filled in later.

Shapes: B rows (one per trajectory), T tokens (padded on the right). Token arrays are aligned with `tokens`:
entry t describes token t itself (the losses shift to next-token alignment where they need it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One task as its environment states it, before tokenization.

    `answer` is what the verifier compares with; `metadata` travels to the environment unchanged.
    """

    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt handed out by the stream. `ordinal` is its place in the endless prompt stream."""

    ordinal: int
    token_ids: tuple[int, ...]
    env_name: str
    problem: Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample completions. Temperature 0 is greedy; `top_k` None and `top_p` 1.0 switch the filter off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """What an engine returns for one request: N generated tokens (a stop token that was produced is included)."""

    token_ids: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N], of the exact sampling distribution
    token_versions: np.ndarray  # int32 [N], weight version that produced each token
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One completion with its reward. T = prompt + generated tokens; prompt entries of the float arrays are 0.

    `masked_because` names why the sample does not train (None: it trains); a masked sample does not shape the
    baseline either. `reward` is always finite (0.0 where the environment's answer was unusable).
    """

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], true on generated tokens
    generation_logprobs: np.ndarray  # float32 [T]
    token_versions: np.ndarray  # int32 [T], -1 on prompt tokens
    reward: float
    finish_reason: FinishReason
    masked_because: str | None = None

    @property
    def num_generated(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrajectoryGroup:
    """A prompt and its G trajectories: the unit of the replay buffer.

    `generation_version` is the oldest weight version used for any token (the version at the group's start);
    `target_step` the step reserved for it. age = target_step - generation_version.
    """

    ordinal: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    generation_version: int
    target_step: int

    @property
    def age(self) -> int:
        return self.target_step - self.generation_version


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutBatch:
    """P groups as padded arrays; rows of one group are neighbours and share their `group_index`."""

    tokens: np.ndarray  # int64 [B, T]
    lengths: np.ndarray  # int64 [B]
    loss_mask: np.ndarray  # bool [B, T], true on generated tokens of the row
    sample_mask: np.ndarray  # bool [B], false: the row does not train
    generation_logprobs: np.ndarray  # float32 [B, T]
    rewards: np.ndarray  # float64 [B]
    group_index: np.ndarray  # int64 [B]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredBatch:
    """A rollout batch with the trainer's log-probs at the start of the step."""

    rollouts: RolloutBatch
    old_logprobs: np.ndarray  # float32 [B, T]
    reference_logprobs: np.ndarray | None  # float32 [B, T]; None: the KL weight is 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainBatch:
    """What one optimizer update trains on (or one data-parallel rank's rows of it).

    `num_valid_tokens` and `num_valid_sequences` count the whole update over all data-parallel ranks, so that every
    rank and micro-batch divides by the same number.
    """

    scored: ScoredBatch
    advantages: np.ndarray  # float32 [B]
    num_valid_tokens: int
    num_valid_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedBatch:
    """Rows for the warm start: cross-entropy on `loss_mask`."""

    tokens: np.ndarray  # int64 [B, T]
    lengths: np.ndarray  # int64 [B]
    loss_mask: np.ndarray  # bool [B, T]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """One step's training, reduced over updates, micro-batches and data-parallel ranks."""

    metrics: Mapping[str, float]  # names without the "train/" prefix: loss, grad_norm, gen_kl_error, ...
    num_updates: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A full batch taken from the buffer: exactly P groups of `target_step`, in insertion order."""

    groups: tuple[TrajectoryGroup, ...]
    evicted: tuple[int, ...]  # ordinals thrown out as stale or left over; they return to the stream
    waited_s: float
    buffer_size: int  # groups left after the batch was taken

    def in_prompt_order(self) -> Sampled:
        """The same batch with its groups by ordinal: which group finished first decides nothing about the updates, so a
        synchronous run repeats itself.
        """
        return replace(self, groups=tuple(sorted(self.groups, key=lambda group: group.ordinal)))


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedPrompt:
    """A prompt that will not be trained: generation_failed, zero_variance or fully_masked."""

    ordinal: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What the collector did since it was last asked: sums by name, and every prompt it dropped."""

    counters: Mapping[str, float]
    dropped: tuple[DroppedPrompt, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierState:
    """Prompt accounting as saved. Everything below `cut` is settled; at or above it the lists tell."""

    cut: int
    frontier: int
    trained_above_cut: tuple[int, ...]
    dropped_above_cut: tuple[int, ...]
    num_owed: int = 0  # prompts dropped by failures whose replacement is not settled yet


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveCursor:
    """The fallback of a stream whose position is not a function of an ordinal; `reason` is logged."""

    position: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """Held-out evaluation on one weight version: mean reward and exact share over `num_samples` prompts."""

    version: int
    accuracy: float
    mean_reward: float
    num_samples: int
    mean_length: float
    seconds: float
