"""vLLM as the generation backend: replicas over their actors, and the weight stream that feeds all of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup

from ..config.schema import Recipe
from ..errors import RunFailed, WeightSyncFailed
from ..interfaces import EngineCapabilities, Tokenizer
from ..layout import Layout
from ..types import Completion, Sampling
from ..weight_sync.stream import StreamSeat, Sums, sum_differences
from ..weight_sync.wire import Manifest
from .calls import Call, Deadline, answers_within
from .cluster import worker_options
from .supervision import Named, Supervisor, answer
from .vllm_worker import ReplicaSpec, VllmWorker

log = logging.getLogger(__name__)

MAX_REPORTED = 5


def start_replicas(
    recipe: Recipe,
    layout: Layout,
    tokenizer: Tokenizer,
    log_dir: str,
    supervisor: Supervisor,
    placement: PlacementGroup | None,
    *,
    first_bundle: int,
) -> tuple[Named, ...]:
    """The actors, watched from their first moment; `VllmBackend.boot` starts what they own."""
    from ..engines.vllm.settings import environment

    on_cuda = placement is not None
    replicas = []
    for index in range(layout.engine.dp):
        name = f"generation replica {index}"
        spec = ReplicaSpec(name=name, recipe=recipe, tokenizer=tokenizer, on_cuda=on_cuda, log_dir=log_dir)
        options = worker_options(placement, first_bundle + index, num_gpus=layout.engine.model_parallel)
        options["runtime_env"]["env_vars"] |= environment(recipe, on_cuda=on_cuda)
        actor = Named(name=name, handle=VllmWorker.options(**options).remote(spec))
        supervisor.watch(actor)
        replicas.append(actor)
    return tuple(replicas)


class VllmBackend:
    """`backends.Backend`. The actors belong to the run, whose supervisor watches and ends them."""

    def __init__(self, policy: Sequence[Named], replicas: Sequence[Named], *, workers_each: int, refit_timeout_s: float):
        self._replicas = replicas
        deadline = Deadline(seconds=refit_timeout_s, setting="timeouts.refit")
        self.engine = VllmEngine(replicas, deadline)
        self.generator = VllmGenerator(replicas)
        self.transfer = StreamTransfer(policy, replicas, workers_each=workers_each, deadline=deadline)

    async def start(self) -> None:
        """Engines and trainer meet."""
        await self.transfer.join()

    async def close(self) -> None:
        await asyncio.gather(*(answer(one, one.handle.close.remote()) for one in self._replicas), return_exceptions=True)


async def boot(replicas: Sequence[Named]) -> None:
    """Start the engines, at the same time as the trainer's models are built."""
    processes = await asyncio.gather(*(answer(one, one.handle.start.remote()) for one in replicas))
    for one, ids in zip(replicas, processes, strict=True):
        log.info("%s: engine process %s", one.name, ", ".join(map(str, ids)))


class VllmEngine:
    """`Engine` over all replicas. Each call ends within `deadline`."""

    capabilities = EngineCapabilities(
        pauses_in_flight=True,
        must_drain=False,
        blocks_training=False,
        wake_carries_weights=False,
        tracks_versions=True,
    )

    def __init__(self, replicas: Sequence[Named], deadline: Deadline):
        self._replicas = replicas
        self._deadline = deadline

    async def _all(self, method: str, *args) -> None:
        await answers_within(self._deadline, [Call(actor=one, method=method, args=args) for one in self._replicas])

    async def pause(self) -> None:
        await self._all("pause")

    async def resume(self) -> None:
        await self._all("resume")

    async def set_version(self, version: int) -> None:
        await self._all("set_version", version)

    async def sleep(self) -> None:
        raise NotImplementedError("vLLM has GPUs of its own")

    async def wake(self) -> None:
        raise NotImplementedError("vLLM has GPUs of its own")


class VllmGenerator:
    """`Generator`: each call goes to the replica with the fewest completions under way. Lives in the collector."""

    def __init__(self, replicas: Sequence[Named]):
        self._replicas = replicas
        self._under_way = [0] * len(replicas)

    async def generate(
        self, prompt_ids: Sequence[int], *, num_generations: int, sampling: Sampling, request_id: str
    ) -> list[Completion]:
        index = self._under_way.index(min(self._under_way))
        replica = self._replicas[index]
        self._under_way[index] += num_generations
        try:
            call = replica.handle.generate.remote(tuple(prompt_ids), num_generations, sampling, request_id)
            return await answer(replica, call)
        finally:
            self._under_way[index] -= num_generations


class StreamTransfer:
    """`WeightTransfer`: the trainer's ranks send one stream, every worker of every replica gets it."""

    def __init__(
        self, policy: Sequence[Named], replicas: Sequence[Named], *, workers_each: int, deadline: Deadline
    ):
        self._policy = policy
        self._replicas = replicas
        self._workers_each = workers_each
        self._deadline = deadline
        self._manifest: Manifest = ()

    async def join(self) -> None:
        """Before the first transfer. Raises WeightSyncFailed when trainer and engine hold different models."""
        manifests = await self._answers([Call(actor=rank, method="prepare_stream") for rank in self._policy])
        self._manifest = manifests[0]
        await self._answers(
            [Call(actor=one, method="check_manifest", args=(self._manifest,)) for one in self._replicas]
        )
        (address,) = await self._answers([Call(actor=self._policy[0], method="free_address")])
        seat = StreamSeat(
            host=address.host,
            port=address.port,
            num_workers=self._workers_each * len(self._replicas),
            timeout_s=self._deadline.seconds,
        )
        joins = [Call(actor=rank, method="join_stream", args=(seat,)) for rank in self._policy]
        for number, one in enumerate(self._replicas):
            joins.append(Call(actor=one, method="join_stream", args=(seat, 1 + number * self._workers_each)))
        await self._answers(joins)

    async def transfer(self) -> None:
        sends = [Call(actor=rank, method="send_stream") for rank in self._policy]
        receives = [Call(actor=one, method="receive_stream", args=(self._manifest,)) for one in self._replicas]
        answers = await self._answers([*sends, *receives])
        self._confirm(answers[0], answers[len(sends) :])

    def _confirm(self, sent: Sums, arrived: Sequence[Sequence[Sums]]) -> None:
        problems = [
            problem
            for replica, workers in zip(self._replicas, arrived, strict=True)
            for number, sums in enumerate(workers)
            for problem in sum_differences(sent, sums, f"worker {number} of {replica.name}")
        ]
        if problems:
            shown = "\n".join(problems[:MAX_REPORTED])
            raise WeightSyncFailed(f"{len(problems)} tensors are not what was sent:\n{shown}")

    async def _answers(self, calls: Sequence[Call]) -> list:
        try:
            return await answers_within(self._deadline, calls)
        except WeightSyncFailed:
            raise
        except RunFailed as error:
            raise WeightSyncFailed(f"the weights did not reach the engine: {error}") from error
