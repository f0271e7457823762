"""The protocols between the parts. The loop, the collector and the strategies know only these.

Who implements what: engines and Ray clients implement `Generator`, `Engine`, `Trainer`; `Environment` is what users
write; the buffer and collector shells in `ray_runtime` implement `Replay` and `Collector`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .types import (
    Collected,
    Completion,
    FrontierState,
    LiveCursor,
    Problem,
    Prompt,
    RolloutBatch,
    Sampled,
    Sampling,
    ScoredBatch,
    TrainBatch,
    TrainResult,
    TrajectoryGroup,
    ValidationResult,
)


class Environment(Protocol):
    """A task: where problems come from and what an answer is worth. Users write one class with these methods.

    Built as `Class(**options)` from the recipe's `env.NAME` block. Instances live in reward worker processes and in
    the driver; `score` may be slow or crash: it runs in a process that is killed at `timeouts.reward`.
    """

    def problems(self, split: str, num: int, seed: int) -> list[Problem]:
        """`num` problems of `split` ("train" or "validation"); the two splits never share a question."""
        ...

    def score(self, problem: Problem, response: str) -> float:
        """The reward of a response (stop token removed)."""
        ...

    def is_correct(self, problem: Problem, response: str) -> bool:
        """Whether the response counts as exactly right in validation."""
        ...

    def solution(self, problem: Problem) -> str:
        """A full-mark response, for the warm start. Raise NotImplementedError where there is none."""
        ...


class Tokenizer(Protocol):
    """Text <-> ids. `vocab_size` counts real ids; a model pads its own rows."""

    vocab_size: int
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode_prompt(self, problem: Problem) -> list[int]:
        """The ids a model is prompted with: chat template, prompt file, or the question itself."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files from which transformers and vLLM load the same tokenizer."""
        ...


class PromptSource(Protocol):
    """Hands out prompts in order; raises EndOfData when no row is left."""

    def next_prompt(self) -> Prompt: ...

    def settle_trained(self, ordinals: Sequence[int]) -> None: ...

    def settle_dropped(self, ordinal: int, reason: str, *, replace: bool = True) -> None: ...

    def put_back(self, ordinal: int) -> None:
        """An evicted group's prompt: its ordinal is handed out again, before new ones."""
        ...

    def state(self) -> FrontierState | LiveCursor: ...


class Journal(Protocol):
    """Writes down what happens to groups. What happens to prompts, their source tells it."""

    def generated(self, group: TrajectoryGroup) -> None:
        """A group is finished, whether or not it will be admitted."""
        ...

    def trained(self, step: int, ordinals: Sequence[int]) -> None: ...


class Generator(Protocol):
    """Samples completions. Usable from any coroutine of the owning process, many at a time."""

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What a generation backend can do; stated once by the backend, read by the composition root."""

    pauses_in_flight: bool  # can pause and keep unfinished requests
    must_drain: bool  # weights may only change with nothing running, whatever the recipe asks for
    blocks_training: bool  # shares the trainer's GPUs
    wake_carries_weights: bool  # waking shows the trainer's weights: no transfer needed
    tracks_versions: bool  # stamps every token with its weight version; if not, its group's start counts


class Engine(Protocol):
    """The control side of a generation backend, as weight synchronisation uses it."""

    capabilities: EngineCapabilities

    async def pause(self) -> None:
        """Stop between two steps and keep request state. Only where `capabilities.pauses_in_flight`."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`; harmless when not paused."""
        ...

    async def set_version(self, version: int) -> None:
        """Stamp tokens from now on with `version`. Only after a transfer was confirmed; exact while paused."""
        ...

    async def sleep(self) -> None:
        """Release the GPUs to the trainer (colocated); a paused engine keeps its unfinished requests."""
        ...

    async def wake(self) -> None:
        """Take the GPUs back; generation sees the weights the trainer holds now. Paused until `resume`; harmless on
        an engine that is awake."""
        ...


class WeightTransfer(Protocol):
    """Moves the policy's weights into the engine. Raises WeightSyncFailed with the cause."""

    async def transfer(self) -> None: ...


class Rollout(Protocol):
    """Turns one prompt into one group: generates, scores, masks. Raises on failure; cancellation is safe."""

    async def run_group(self, prompt: Prompt, *, target_step: int, generation_version: int) -> TrajectoryGroup: ...

    @property
    def num_generating(self) -> int:
        """Groups whose tokens are being generated right now (scoring does not count)."""
        ...

    async def wait_drained(self) -> None:
        """Return when `num_generating` is 0."""
        ...


class Producer(Protocol):
    """The collector's view of the buffer."""

    async def add(self, group: TrajectoryGroup) -> None:
        """Wait while the buffer is full (never for the lowest open target); ReplayClosed ends the wait."""
        ...

    async def end_of_data(self, first_missing_target: int) -> None:
        """No group will ever come for this target or later ones: `sample` of it raises EndOfData."""
        ...


class Replay(Protocol):
    """The loop's view of the buffer."""

    async def sample(self, target_step: int) -> Sampled:
        """Wait for a full batch. Raises ReplayClosed (with the cause), EndOfData or DeadlineExceeded."""
        ...

    async def close(self, cause: str) -> None: ...


class Collector(Protocol):
    """The loop's view of the background rollouts."""

    def collecting(self) -> AbstractAsyncContextManager[None]:
        """Collect while the block runs; a collector that fails closes the buffer with its error."""
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """No new group starts inside the block. Re-entrant; ends also on error."""
        ...

    async def drain(self) -> None:
        """Wait until no group is generating. Only meaningful inside `paused()`."""
        ...

    async def set_version(self, version: int) -> None: ...

    async def settle(self, trained: Sequence[int], evicted: Sequence[int], step: int) -> None:
        """Step `step` trained these ordinals; evicted ones return to the stream."""
        ...

    async def evaluate(self) -> ValidationResult:
        """Held-out evaluation with the engine's current weights; call inside `paused()`."""
        ...

    async def collected(self) -> Collected:
        """What happened since the last call: failures, masked rewards, generated tokens, lengths; dropped prompts."""
        ...


class Trainer(Protocol):
    """The policy workers, seen as one."""

    async def score(self, rollouts: RolloutBatch) -> ScoredBatch: ...

    async def train(self, updates: Sequence[TrainBatch]) -> TrainResult: ...


class WeightSync(Protocol):
    """A strategy, chosen once: drain | in-flight | colocated."""

    def training_window(self) -> AbstractAsyncContextManager[None]:
        """Inside the block the trainer owns its GPUs."""
        ...

    async def publish(self, version: int) -> None:
        """Stop new starts, drain or pause, move the weights, set the version, resume."""
        ...
