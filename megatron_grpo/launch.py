"""Composition root: recipe in, run out. The only module that imports every layer; modes are chosen here, once.

    load and check the recipe, prepare the data   nothing has started: every complaint is a ConfigError, exit code 2
    start Ray, the ranks, the collector           within `timeouts.actor_start`
    warm start, then the loop                     under supervision: a dead part ends the run with its own error
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .backends import Backend, BackendFactory, BackendSetting, check_capabilities, load_backend
from .batcher import GrpoBatcher
from .config.derived import buffer_capacity, max_age
from .config.load import load_recipe
from .config.schema import Recipe
from .errors import ConfigError, Interrupted
from .layout import Layout
from .loop import Run, async_grpo_train
from .metrics import MetricsWriter
from .platform.device import accelerator_for
from .ray_runtime.actors import BufferSettings, ReplayBufferActor
from .ray_runtime.clients import RayCollector, RayPolicyRanks, RayReplay, RayTrainer
from .ray_runtime.cluster import ray_cluster
from .ray_runtime.collector_actor import AsyncTrajectoryCollector, CollectorSpec
from .ray_runtime.megatron_backend import MegatronBackend
from .ray_runtime.start import Workers, start_deadline, start_workers
from .ray_runtime.supervision import Named, Supervisor, answer
from .report.console import log_through, open_console, say
from .report.progress import Display, open_display
from .report.reporter import RunReporter
from .report.summary import RunHistory, format_summary
from .weight_sync.choose import choose_weight_sync
from .workload import Workload, prepare_workload

log = logging.getLogger(__name__)

_CLOSE_S = 30.0
_WARM_START_CHUNK = 10  # steps per call: often enough for a progress line


def train(recipe_path: str, overrides: Sequence[str] = (), *, strict: bool = False) -> int:
    """Run a recipe to its end and return 0. ConfigError: nothing was started. RunFailed: a part ended the run."""
    loaded = load_recipe(recipe_path, overrides)
    recipe = loaded.recipe
    if refused := [*loaded.notes, *loaded.unreadable, *(loaded.ineffective if strict else ())]:
        raise ConfigError(refused)
    console = open_console()
    log_through(console)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    log_dir = Path(recipe.logger.log_dir).absolute()
    plan = Plan(
        recipe=recipe,
        layout=Layout.from_recipe(recipe),
        workload=prepare_workload(recipe),
        log_dir=str(log_dir),
        use_gpus=accelerator_for(recipe).is_cuda,
        external_backend=_external_backend(recipe),
    )
    history = RunHistory(num_steps=plan.workload.num_steps)
    wandb = recipe.logger.wandb.model_dump() if recipe.logger.wandb_enabled else None
    plain_reporter = partial(RunReporter, history=history, validation_due=plan.validation_due)
    with (
        MetricsWriter(log_dir, tensorboard=recipe.logger.tensorboard_enabled, wandb=wandb) as writer,
        open_display(console) as display,
        closing(plain_reporter(writer=writer, display=display)) as reporter,
        ray_cluster(),
    ):
        asyncio.run(_until_signal(_run(plan, display, reporter)))
    say(console, format_summary(history.summary({"metrics": str(log_dir / "metrics.jsonl"), "logs": str(log_dir)})))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is known before anything starts."""

    recipe: Recipe
    layout: Layout
    workload: Workload
    log_dir: str
    use_gpus: bool
    external_backend: BackendFactory | None  # None: the built-in Megatron engine generates

    def validation_due(self, num_finished: int) -> bool:
        grpo, last = self.recipe.grpo, self.workload.num_steps
        if not self.workload.validation_rows:
            return False
        if num_finished in (0, last):
            return grpo.val_at_start if num_finished == 0 else grpo.val_at_end or _divides(grpo.val_period, last)
        return _divides(grpo.val_period, num_finished)


def _external_backend(recipe: Recipe) -> BackendFactory | None:
    name = recipe.policy.generation.backend
    return None if name == "megatron" else load_backend(name)


def _divides(period: int, number: int) -> bool:
    return period > 0 and number % period == 0


async def _run(plan: Plan, display: Display, reporter: RunReporter) -> None:
    supervisor = Supervisor()
    try:
        display.phase("starting workers")
        started = time.monotonic()
        async with start_deadline("starting the workers", plan.recipe.timeouts.actor_start):
            parts = await _start(plan, supervisor)
        display.note(f"workers ready after {time.monotonic() - started:.1f} s")
        await supervisor.supervise(asyncio.ensure_future(_warm_start_and_train(plan, parts, display, reporter)))
    finally:
        supervisor.end_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The running actors behind their protocols."""

    backend: Backend
    trainer: RayTrainer
    collector: RayCollector
    replay: RayReplay


async def _start(plan: Plan, supervisor: Supervisor) -> Parts:
    recipe, workload = plan.recipe, plan.workload
    buffer = Named(name="replay buffer", handle=ReplayBufferActor.remote(_buffer_settings(plan), plan.log_dir))
    spec = CollectorSpec(
        recipe=recipe,
        num_steps=workload.num_steps,
        start_version=0,
        train_rows=workload.train_rows,
        validation_rows=workload.validation_rows,
        tokenizer=workload.tokenizer,
        log_dir=plan.log_dir,
    )
    collector = Named(name="collector", handle=AsyncTrajectoryCollector.remote(spec, buffer))
    supervisor.watch(buffer)
    supervisor.watch(collector)
    workers, _ = await asyncio.gather(
        start_workers(
            recipe,
            plan.layout,
            workload.tokenizer,
            plan.log_dir,
            supervisor,
            use_gpus=plan.use_gpus,
            with_engine=plan.external_backend is None,
        ),
        answer(collector, collector.handle.open.remote()),
    )
    backend = _backend(plan, workers)
    replay = RayReplay(buffer)
    return Parts(
        backend=backend,
        trainer=RayTrainer(workers.policy, [rank.dp for rank in plan.layout.train.ranks], plan.layout.train.dp),
        collector=RayCollector(collector, replay),
        replay=replay,
    )


def _backend(plan: Plan, workers: Workers) -> Backend:
    """Made, not started. ConfigError: the backend was made for another placement than the recipe's."""
    if plan.external_backend is None:
        return MegatronBackend(workers, refit_timeout_s=plan.recipe.timeouts.refit)
    generation, tokenizer = plan.recipe.policy.generation, plan.workload.tokenizer
    backend = plan.external_backend(
        BackendSetting(
            recipe=plan.recipe,
            layout=plan.layout,
            options=generation.backend_options or {},
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            log_dir=plan.log_dir,
            policy=RayPolicyRanks(workers.policy),
        )
    )
    check_capabilities(generation.backend, backend.engine.capabilities, colocated=generation.colocated.enabled)
    return backend


def _buffer_settings(plan: Plan) -> BufferSettings:
    return BufferSettings(
        capacity=buffer_capacity(plan.recipe),
        num_prompts_per_step=plan.recipe.grpo.num_prompts_per_step,
        max_age=max_age(plan.recipe),
        num_steps=plan.workload.num_steps,
        sample_timeout_s=plan.recipe.timeouts.sample,
    )


async def _warm_start_and_train(plan: Plan, parts: Parts, display: Display, reporter: RunReporter) -> None:
    if plan.recipe.warm_start is not None:
        await _warm_start(plan, parts.trainer, display)
    async with _generating(plan, parts):
        await _train(plan, parts, reporter)


@asynccontextmanager
async def _generating(plan: Plan, parts: Parts) -> AsyncIterator[None]:
    """The engine runs inside the block and the collector knows it."""
    backend = parts.backend
    try:
        async with start_deadline("starting the generation engine", plan.recipe.timeouts.actor_start):
            await backend.start()
        stamps_versions = backend.engine.capabilities.tracks_versions
        await parts.collector.use_engine(backend.generator, stamps_versions=stamps_versions)
        yield
    finally:
        await _close(backend)


async def _close(backend: Backend) -> None:
    """Bounded: a backend that does not end must not keep the run's own end waiting."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await backend.close()
    except TimeoutError:
        log.error("the generation backend did not close within %g s", _CLOSE_S)


async def _train(plan: Plan, parts: Parts, reporter: RunReporter) -> None:
    async_grpo = plan.recipe.grpo.async_grpo
    await async_grpo_train(
        Run(
            start_step=0,
            num_steps=plan.workload.num_steps,
            replay=parts.replay,
            collector=parts.collector,
            weight_sync=choose_weight_sync(
                collector=parts.collector,
                engine=parts.backend.engine,
                transfer=parts.backend.transfer,
                in_flight=async_grpo.enabled and async_grpo.in_flight_weight_updates,
            ),
            trainer=parts.trainer,
            batcher=GrpoBatcher(
                plan.recipe,
                pad_id=plan.workload.tokenizer.pad_id,
                pad_multiple=plan.layout.train.padding_multiple,
            ),
            reporter=reporter,
            validation_due=plan.validation_due,
        )
    )


async def _warm_start(plan: Plan, trainer: RayTrainer, display: Display) -> None:
    """Supervised steps on the task's own solutions; afterwards RL starts with a fresh optimizer."""
    warm_start = plan.recipe.warm_start
    assert warm_start is not None
    started = time.monotonic()
    batches = list(plan.workload.warm_start_batches(plan.recipe, plan.layout.train.padding_multiple))
    losses: list[float] = []
    for first in range(0, len(batches), _WARM_START_CHUNK):
        losses += await trainer.warm_start(batches[first : first + _WARM_START_CHUNK], warm_start.lr)
        display.phase(f"warm start {len(losses)}/{len(batches)}, loss {losses[-1]:.3f}")
    await trainer.finish_warm_start()
    seconds = time.monotonic() - started
    display.note(f"warm start: {len(losses)} steps in {seconds:.1f} s, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; SIGTERM and SIGINT cancel it, so that every process is ended before the driver leaves."""
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
