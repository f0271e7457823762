"""The built-in generation backend: Megatron engines in the ranks that `start_workers` made."""

from __future__ import annotations

from .calls import Deadline
from .clients import RayEngine, RayGenerator, RayWeightTransfer
from .start import Workers, start_engines


class MegatronBackend:
    """`backends.Backend`. The ranks belong to the run, whose supervisor watches and ends them."""

    def __init__(self, workers: Workers, *, refit_timeout_s: float):
        self._workers = workers
        deadline = Deadline(seconds=refit_timeout_s, setting="timeouts.refit")
        self.engine = RayEngine(workers.generation, colocated=workers.colocated, deadline=deadline)
        self.generator = RayGenerator(workers.generation[0])
        self.transfer = RayWeightTransfer(workers.policy, workers.generation, deadline=deadline)

    async def start(self) -> None:
        await start_engines(self._workers)

    async def close(self) -> None:
        return None
