"""One rank: a policy rank, a generation rank, or both in one process (colocated). A shell; the work is in `engines`.

Calls that enter Megatron run on ONE thread in arrival order: two at a time would interleave their collectives and
hang. `generate` and `hold` stay on the actor's event loop, so requests run on while the thread is idle or busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray

from ..config.schema import Recipe
from ..layout import Layout, World
from ..types import Completion, RolloutBatch, Sampling, SupervisedBatch, TrainBatch, TrainResult
from ..weight_sync.seat import Seat
from ..weight_sync.wire import Manifest
from .actors import Held, log_to_file
from .ports import free_port

if TYPE_CHECKING:
    from ..weight_sync.second_model import SecondModel
    from ..weight_sync.stream import StreamSeat, WeightStream
    from ..weight_sync.transfer import WeightTransfer

Role = Literal["policy", "generation", "colocated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a rank must know; `world` is the world of its role, `rank` its place there."""

    name: str
    role: Role
    recipe: Recipe
    world: World
    rank: int
    vocab_size: int
    eos_id: int
    log_dir: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """Log-probs of one data-parallel shard, float32 [b, t]."""

    old_logprobs: np.ndarray
    reference_logprobs: np.ndarray | None


@ray.remote(max_concurrency=100_000)
class MegatronWorker(Held):
    def __init__(self, spec: WorkerSpec):
        log_to_file(spec.log_dir, spec.name)
        self._spec = spec
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron")
        self._engine_started = asyncio.Event()
        self._transfer: WeightTransfer | None = None
        self._stream: WeightStream | None = None  # an engine that reads Hugging Face names
        self._second_model: SecondModel | None = None  # colocated, and the engine is cut in its own way

    async def _run(self, function: Callable, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # ---- start-up

    async def free_address(self) -> Address:
        return Address(host=ray.util.get_node_ip_address(), port=free_port())

    async def build(self, rendezvous: Address) -> None:
        """Join the world of this role and build the model (and optimizer, where it trains)."""
        await self._run(self._build, rendezvous)

    def _build(self, rendezvous: Address) -> None:
        # Imports wait for this process: the platform must be prepared before megatron is.
        from ..platform.device import accelerator_for

        accelerator = self._accelerator = accelerator_for(self._spec.recipe)
        accelerator.prepare()
        from ..engines.megatron import build
        from ..engines.megatron.checkpoint import PolicyCheckpoint

        spec = self._spec
        if spec.role == "generation":
            self._module = build.generation_module(
                spec.recipe, spec.world, spec.rank, rendezvous, spec.vocab_size, accelerator
            )
        else:
            self._policy = build.policy(spec.recipe, spec.world, spec.rank, rendezvous, spec.vocab_size, accelerator)
            self._module = self._policy.module
            self._checkpoint = PolicyCheckpoint(self._policy)

    async def join_transfer_group(self, seat: Seat) -> None:
        """Join trainer and generation worlds by one group; collective over both. Again after a failed transfer."""
        await self._run(self._join_transfer_group, seat)

    def _join_transfer_group(self, seat: Seat) -> None:
        from ..weight_sync.transfer import WeightTransfer

        if self._transfer is not None:
            self._transfer.rejoin(seat)
            return
        self._transfer = WeightTransfer(
            self._module, seat, backend=self._accelerator.backend, timeout_s=self._spec.recipe.timeouts.refit
        )

    async def start_engine(self) -> None:
        await self._run(self._start_engine)
        self._asleep = False
        self._engine_started.set()

    def _start_engine(self) -> None:
        from ..engines.megatron.inference import MegatronGeneration

        spec, world, module = self._spec, Layout.from_recipe(self._spec.recipe).engine, self._module
        if spec.role == "colocated":
            if world != spec.world:
                module = self._build_second_model(world)
            self._enter_generation()
        self._generation = MegatronGeneration(
            module, spec.recipe, world, spec.rank, vocab_size=spec.vocab_size, eos_id=spec.eos_id
        )

    def _build_second_model(self, world: World) -> Any:
        from ..engines.megatron import build
        from ..weight_sync.second_model import SecondModel

        spec, accelerator = self._spec, self._accelerator
        module = build.second_module(spec.recipe, world, spec.vocab_size, accelerator)
        self._second_model = SecondModel(
            self._module, module, backend=accelerator.backend, timeout_s=spec.recipe.timeouts.refit
        )
        return module

    def _enter_generation(self) -> None:
        self._policy.enter_generation()
        if self._second_model is not None:
            self._second_model.refresh()

    async def hold(self) -> None:
        """Ends only with the engine's failure (or the process)."""
        await self._engine_started.wait()
        await self._generation.failed()

    # ---- trainer

    async def score(self, rollouts: RolloutBatch) -> Scores | None:
        """Log-probs of this data-parallel shard; None on ranks that only take part."""
        scored = await self._run(self._policy.score, rollouts)
        if not self._policy.reports:
            return None
        return Scores(old_logprobs=scored.old_logprobs, reference_logprobs=scored.reference_logprobs)

    async def train(self, updates: Sequence[TrainBatch]) -> TrainResult | None:
        result = await self._run(self._policy.train, updates)
        return result if self._policy.reports else None

    async def warm_start(self, batches: Sequence[SupervisedBatch], lr: float) -> list[float] | None:
        losses = await self._run(self._policy.warm_start, batches, lr)
        return losses if self._policy.reports else None

    async def finish_warm_start(self) -> None:
        await self._run(self._policy.finish_warm_start)

    # ---- checkpoints: collective over the policy ranks

    async def begin_save(self, path: Path) -> None:
        """Returns when the state is copied; the writing goes on in a thread."""
        await self._run(self._checkpoint.begin_save, path)

    async def finish_save(self, blocking: bool) -> bool:
        return await self._run(partial(self._checkpoint.finish, blocking=blocking))

    async def load_checkpoint(self, path: Path) -> None:
        await self._run(self._checkpoint.load, path)

    async def send_weights(self) -> None:
        await self._run(self._transfer.send)

    # ---- weights to an engine that reads Hugging Face names: collective over the policy ranks

    async def prepare_stream(self) -> Manifest:
        """What every later stream holds."""
        return await self._run(self._prepare_stream)

    def _prepare_stream(self) -> Manifest:
        from ..engines.megatron.build import weight_stream

        if self._stream is None:
            self._stream = weight_stream(self._spec.recipe, self._module, self._spec.vocab_size, self._accelerator)
        return self._stream.manifest

    async def join_stream(self, seat: StreamSeat) -> None:
        """Meet the engine's workers; again after one was replaced."""
        await self._run(self._stream.join, seat)

    async def send_stream(self) -> dict[str, int] | None:
        """The checksums of what was sent, from rank 0. Meets `receive_stream` of the engine's replicas."""
        return await self._run(self._stream.send)

    async def call_with_module(self, function: Callable, *args: Any) -> Any:
        """For generation backends of other packages: they take the weights themselves."""
        return await self._run(function, self._module, *args)

    # ---- engine

    async def receive_weights(self) -> None:
        """Collective with `send_weights`, while the engine is paused."""
        await self._run(self._transfer.receive)

    async def pause(self) -> None:
        await self._generation.pause()

    async def resume(self) -> None:
        await self._generation.resume()

    async def generate(
        self, prompt_ids: Sequence[int], num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        return await self._generation.generate(
            prompt_ids, num_generations=num_generations, sampling=sampling, request_id=request_id
        )

    async def set_version(self, version: int) -> None:
        await self._generation.set_version(version)

    async def sleep(self) -> None:
        """Colocated: the engine hands the model to the trainer."""
        await self._generation.sleep()
        await self._run(self._policy.enter_training)
        self._asleep = True

    async def wake(self) -> None:
        """Colocated: the engine takes the model back. An engine that is awake stays so."""
        if self._asleep:
            await self._run(self._enter_generation)
            await self._generation.wake()
            self._asleep = False
