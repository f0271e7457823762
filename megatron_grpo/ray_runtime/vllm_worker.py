"""One replica of vLLM: an actor that owns an AsyncLLM, whose engine and workers are its child processes.

Everything runs on the actor's event loop; only the start of the engine blocks it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from ..config.schema import Recipe
from ..interfaces import Tokenizer
from ..types import Completion, Sampling
from ..weight_sync.hf_model import hf_architecture
from ..weight_sync.stream import StreamSeat, Sums
from ..weight_sync.wire import BUCKET_BYTES, Manifest
from .actors import Held, log_to_file

if TYPE_CHECKING:
    from ..engines.vllm.replica import VllmReplica


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpec:
    name: str
    recipe: Recipe
    tokenizer: Tokenizer
    on_cuda: bool
    log_dir: str


@ray.remote(max_concurrency=100_000)
class VllmWorker(Held):
    def __init__(self, spec: ReplicaSpec):
        log_to_file(spec.log_dir, spec.name)
        self._spec = spec
        self._started = asyncio.Event()
        self._replica: VllmReplica

    # ---- life

    async def start(self) -> list[int]:
        """Start the engine; it waits for weights. The process ids of what was started."""
        from ..engines.vllm import settings
        from ..engines.vllm.replica import VllmReplica

        spec = self._spec
        recipe, tokenizer = spec.recipe, spec.tokenizer
        self._folder = self._write_model()
        self._replica = VllmReplica(
            settings.engine_arguments(recipe, str(self._folder), on_cuda=spec.on_cuda),
            name=spec.name,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            seed=recipe.grpo.seed,
            recompute_cache=recipe.grpo.async_grpo.recompute_kv_cache_after_weight_updates,
        )
        await self._replica.pause()
        self._started.set()
        return self._replica.process_ids

    def _write_model(self) -> Path:
        from ..engines.vllm.model_folder import write_model_folder

        spec, tokenizer = self._spec, self._spec.tokenizer
        folder = Path(tempfile.mkdtemp(prefix="megatron_grpo_vllm_"))
        write_model_folder(
            folder,
            hf_architecture(spec.recipe, tokenizer.vocab_size),
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            dtype=spec.recipe.policy.precision,
        )
        tokenizer.save(folder)
        return folder

    async def hold(self) -> None:
        """Ends only with the engine's failure (or the process)."""
        await self._started.wait()
        await self._replica.failed()

    async def close(self) -> None:
        """End the engine's processes."""
        if self._started.is_set():
            self._replica.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- sampling

    async def generate(
        self, prompt_ids: Sequence[int], num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        await self._started.wait()
        return await self._replica.generate(
            prompt_ids, num_generations=num_generations, sampling=sampling, request_id=request_id
        )

    # ---- control

    async def pause(self) -> None:
        await self._replica.pause()

    async def resume(self) -> None:
        await self._replica.resume()

    async def set_version(self, version: int) -> None:
        await self._replica.set_version(version)

    # ---- weights, while paused

    async def check_manifest(self, manifest: Manifest) -> None:
        from ..engines.vllm.model_folder import check_manifest

        check_manifest(self._folder, manifest, self._spec.recipe.policy.precision)

    async def join_stream(self, seat: StreamSeat, rank_offset: int) -> None:
        """Meet the trainer's rank 0; this replica's workers are ranks `rank_offset`, ... of the group."""
        init = {
            "master_address": seat.host,
            "master_port": seat.port,
            "rank_offset": rank_offset,
            "world_size": 1 + seat.num_workers,
        }
        if not self._spec.on_cuda:
            init["timeout_s"] = seat.timeout_s
        await self._replica.join(init)

    async def receive_stream(self, manifest: Manifest) -> list[Sums]:
        """What each worker got, in checksums. Meets `send_stream` of the trainer."""
        return await self._replica.receive(manifest, BUCKET_BYTES)
