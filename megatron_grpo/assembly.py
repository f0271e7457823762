"""The parts of a run, built from its plan and wired into the loop.

    workers, collector, buffer   within `timeouts.actor_start`
    start of training            resumed from a checkpoint, or the warm start
    engine, then the loop        what the engine serves first are the weights of the start
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup

from .backends import Backend, BackendSetting, check_capabilities
from .batcher import GrpoBatcher
from .checkpoint.retention import Retention
from .checkpoint.saving import NoCheckpoints, RunCheckpoints
from .config.derived import buffer_capacity, max_age
from .data.ledger import LEDGER_NAME
from .data.saved_prompts import StartPoint
from .data.stream_state import resume_point
from .loop import Checkpoints, Run, async_grpo_train
from .plan import Plan
from .ray_runtime.actors import BufferSettings, ReplayBufferActor
from .ray_runtime.clients import RayCollector, RayPolicyRanks, RayReplay, RayTrainer
from .ray_runtime.cluster import reserve
from .ray_runtime.collector_actor import AsyncTrajectoryCollector, CollectorSpec
from .ray_runtime.megatron_backend import MegatronBackend
from .ray_runtime.start import Workers, start_deadline, start_workers
from .ray_runtime.starting import CollectorStart
from .ray_runtime.stores import RayBufferStore, RayPolicyStore
from .ray_runtime.supervision import Named, Supervisor, answer
from .ray_runtime.vllm_backend import VllmBackend, boot, start_replicas
from .report.progress import Display
from .report.reporter import RunReporter
from .stopping import StopRequest
from .weight_sync.choose import choose_weight_sync

log = logging.getLogger(__name__)

_CLOSE_S = 30.0
_WARM_START_CHUNK = 10  # steps per call: often enough for a progress line


async def run_plan(plan: Plan, display: Display, reporter: RunReporter, stop: StopRequest) -> int:
    """The number of finished steps. No process is left when it returns or raises."""
    supervisor = Supervisor()
    try:
        display.phase("starting workers")
        started = time.monotonic()
        async with start_deadline("starting the workers", plan.recipe.timeouts.actor_start):
            parts = await _start(plan, supervisor)
        display.note(f"workers ready after {time.monotonic() - started:.1f} s")
        work = _prepare_and_train(plan, parts, display, reporter, stop)
        return await supervisor.supervise(asyncio.ensure_future(work))
    finally:
        supervisor.end_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The running actors behind their protocols."""

    backend: Backend
    trainer: RayTrainer
    collector: RayCollector
    replay: RayReplay
    policy_store: RayPolicyStore
    buffer_store: RayBufferStore


async def _start(plan: Plan, supervisor: Supervisor) -> Parts:
    recipe, workload = plan.recipe, plan.workload
    buffer = Named(name="replay buffer", handle=ReplayBufferActor.remote(_buffer_settings(plan), plan.log_dir))
    spec = CollectorSpec(
        recipe=recipe,
        num_steps=workload.num_steps,
        start_version=plan.start_step,
        train_rows=workload.train_rows,
        validation_rows=workload.validation_rows,
        tokenizer=workload.tokenizer,
        log_dir=plan.log_dir,
        ledger_dir=None if plan.checkpoints is None else plan.checkpoints.root / LEDGER_NAME,
    )
    collector = Named(name="collector", handle=AsyncTrajectoryCollector.remote(spec, buffer))
    supervisor.watch(buffer)
    supervisor.watch(collector)
    placement = reserve(_bundles(plan), use_gpus=plan.use_gpus, timeout_s=recipe.timeouts.actor_start)
    replicas = _vllm_replicas(plan, supervisor, placement)
    workers, *_ = await asyncio.gather(
        start_workers(
            recipe,
            plan.layout,
            workload.tokenizer,
            plan.log_dir,
            supervisor,
            placement=placement,
            with_engine=plan.external_backend is None and not replicas,
        ),
        answer(collector, collector.handle.open.remote()),
        boot(replicas),
    )
    backend = _backend(plan, workers, replicas)
    replay = RayReplay(buffer)
    return Parts(
        backend=backend,
        trainer=RayTrainer(workers.policy, [rank.dp for rank in plan.layout.train.ranks], plan.layout.train.dp),
        collector=RayCollector(collector, replay),
        replay=replay,
        policy_store=RayPolicyStore(workers.policy),
        buffer_store=RayBufferStore(buffer),
    )


def _bundles(plan: Plan) -> list[int]:
    """GPUs of each worker: trainer ranks, then Megatron's generation ranks or vLLM's replicas."""
    bundles, generation = [1] * plan.layout.train.size, plan.layout.generation
    if generation is not None and plan.external_backend is None:
        size = generation.model_parallel if _uses_vllm(plan) else 1
        bundles += [size] * (generation.size // size)
    return bundles


def _uses_vllm(plan: Plan) -> bool:
    return plan.recipe.policy.generation.backend == "vllm"


def _vllm_replicas(plan: Plan, supervisor: Supervisor, placement: PlacementGroup | None) -> tuple[Named, ...]:
    if not _uses_vllm(plan):
        return ()
    return start_replicas(
        plan.recipe,
        plan.layout,
        plan.workload.tokenizer,
        plan.log_dir,
        supervisor,
        placement,
        first_bundle=plan.layout.train.size,
    )


def _backend(plan: Plan, workers: Workers, replicas: Sequence[Named]) -> Backend:
    """Made, not started. ConfigError: the backend was made for another placement than the recipe's."""
    refit_timeout_s = plan.recipe.timeouts.refit
    if replicas:
        workers_each = plan.layout.engine.model_parallel
        return VllmBackend(workers.policy, replicas, workers_each=workers_each, refit_timeout_s=refit_timeout_s)
    if plan.external_backend is None:
        return MegatronBackend(workers, refit_timeout_s=refit_timeout_s)
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


async def _prepare_and_train(
    plan: Plan, parts: Parts, display: Display, reporter: RunReporter, stop: StopRequest
) -> int:
    if plan.resume is not None:
        display.phase(f"loading {plan.resume.path}")
        await parts.policy_store.load(plan.resume.policy_path)
        display.note(f"resumed after step {plan.resume.step} from {plan.resume.path}")
    elif plan.recipe.warm_start is not None:
        await _warm_start(plan, parts.trainer, display)
    async with _generating(plan, parts):
        return await async_grpo_train(_loop_of(plan, parts, reporter, stop))


@asynccontextmanager
async def _generating(plan: Plan, parts: Parts) -> AsyncIterator[None]:
    """The engine runs inside the block and the collector knows it."""
    backend = parts.backend
    try:
        async with start_deadline("starting the generation engine", plan.recipe.timeouts.actor_start):
            await backend.start()
        start = await _collector_start(plan, parts.buffer_store)
        stamps_versions = backend.engine.capabilities.tracks_versions
        await parts.collector.use_engine(backend.generator, start, stamps_versions=stamps_versions)
        yield
    finally:
        await _close(backend)


async def _collector_start(plan: Plan, buffer: RayBufferStore) -> CollectorStart:
    """Restores the buffer first: the prompts of its groups are not handed out again."""
    resume = plan.resume
    if resume is None:
        fresh = None if plan.checkpoints is None else StartPoint(step=0, point=None, oldest_versions={})
        return CollectorStart(at=fresh, order=None, buffered={})
    restored = await buffer.restore(resume.buffer_path, resume.step)
    found = resume.buffer_found(has_ordinals=restored.has_ordinals)
    point = resume_point(resume.stream, found, str(resume.path))
    return CollectorStart(
        at=StartPoint(step=resume.step, point=point, oldest_versions=restored.oldest_versions),
        order=resume.stream.order,
        buffered=restored.target_of,
    )


async def _close(backend: Backend) -> None:
    """Bounded: a backend that does not end must not keep the run's own end waiting."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await backend.close()
    except TimeoutError:
        log.error("the generation backend did not close within %g s", _CLOSE_S)


def _loop_of(plan: Plan, parts: Parts, reporter: RunReporter, stop: StopRequest) -> Run:
    async_grpo = plan.recipe.grpo.async_grpo
    return Run(
        start_step=plan.start_step,
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
        checkpoints=_checkpoints(plan, parts),
        stop=stop,
    )


def _checkpoints(plan: Plan, parts: Parts) -> Checkpoints:
    if plan.checkpoints is None:
        return NoCheckpoints()
    settings = plan.recipe.checkpointing
    return RunCheckpoints(
        plan.checkpoints,
        Retention(
            keep_top_k=settings.keep_top_k,
            metric_name=settings.metric_name,
            higher_is_better=settings.higher_is_better,
            save_period=settings.save_period,
        ),
        policy=parts.policy_store,
        prompts=parts.collector,
        buffer=parts.buffer_store,
        documents=plan.documents,
        num_steps=plan.workload.num_steps,
        last_saved=plan.start_step,
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
