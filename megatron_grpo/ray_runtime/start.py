"""Starts the ranks of a run and brings them to the point where they can train and generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup

from ..config.schema import Recipe
from ..errors import DeadlineExceeded
from ..interfaces import Tokenizer
from ..layout import Layout, World
from ..weight_sync.seat import Seat
from .clients import all_answers
from .cluster import worker_options
from .megatron_worker import MegatronWorker, Role, WorkerSpec
from .supervision import Named, Supervisor, answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The ranks by what they do; colocated ranks are in both lists."""

    policy: tuple[Named, ...]
    generation: tuple[Named, ...]

    @property
    def colocated(self) -> bool:
        return self.policy == self.generation


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFactory:
    """Makes the actors of one run; each is watched from its first moment."""

    recipe: Recipe
    tokenizer: Tokenizer
    log_dir: str
    supervisor: Supervisor
    placement: PlacementGroup | None

    def world(self, world: World, role: Role, first_bundle: int) -> tuple[Named, ...]:
        return tuple(self._worker(world, role, rank, first_bundle + rank) for rank in range(world.size))

    def _worker(self, world: World, role: Role, rank: int, bundle: int) -> Named:
        name = f"{'generation' if role == 'generation' else 'policy'} worker {rank}"
        spec = WorkerSpec(
            name=name,
            role=role,
            recipe=self.recipe,
            world=world,
            rank=rank,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            log_dir=self.log_dir,
        )
        actor = Named(name=name, handle=MegatronWorker.options(**worker_options(self.placement, bundle)).remote(spec))
        self.supervisor.watch(actor)
        return actor


async def start_workers(
    recipe: Recipe,
    layout: Layout,
    tokenizer: Tokenizer,
    log_dir: str,
    supervisor: Supervisor,
    *,
    placement: PlacementGroup | None,
    with_engine: bool,
) -> Workers:
    """All ranks with their models built and, when disjoint, joined by the transfer group. Engines are not running.

    `with_engine` false: something else generates, only policy ranks are started.
    """
    own_world = layout.generation if with_engine else None
    factory = WorkerFactory(
        recipe=recipe,
        tokenizer=tokenizer,
        log_dir=log_dir,
        supervisor=supervisor,
        placement=placement,
    )
    if not with_engine:
        policy, generation = factory.world(layout.train, "policy", 0), ()
        await _build(policy)
    elif own_world is None:
        policy = generation = factory.world(layout.train, "colocated", 0)
        await _build(policy)
    else:
        policy = factory.world(layout.train, "policy", 0)
        generation = factory.world(own_world, "generation", layout.train.size)
        await asyncio.gather(_build(policy), _build(generation))
        await _join_transfer_group(policy, generation)
    return Workers(policy=policy, generation=generation)


async def start_engines(workers: Workers) -> None:
    """Start the engine over the weights the models hold now; afterwards it is awake."""
    await all_answers(workers.generation, "start_engine")


async def _build(ranks: Sequence[Named]) -> None:
    """Each world meets at an address of its rank 0."""
    rendezvous = await answer(ranks[0], ranks[0].handle.free_address.remote())
    await all_answers(ranks, "build", rendezvous)


async def _join_transfer_group(policy: Sequence[Named], generation: Sequence[Named]) -> None:
    address = await answer(policy[0], policy[0].handle.free_address.remote())
    seats = [
        Seat(
            host=address.host,
            port=address.port,
            rank=rank,
            num_policy=len(policy),
            num_generation=len(generation),
        )
        for rank in range(len(policy) + len(generation))
    ]
    joins = [
        answer(actor, actor.handle.join_transfer_group.remote(seat))
        for actor, seat in zip([*policy, *generation], seats, strict=True)
    ]
    await asyncio.gather(*joins)


@asynccontextmanager
async def start_deadline(what: str, seconds: float) -> AsyncIterator[None]:
    """DeadlineExceeded naming `what` when the block takes longer than `timeouts.actor_start`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what} did not finish within {seconds:g} s (timeouts.actor_start); see the logs of the workers"
        ) from None
