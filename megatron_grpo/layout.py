"""Which rank runs where, and its place in every parallel group. Pure arithmetic on the recipe.

Rank order is Megatron's tp-cp-ep-dp-pp, the fastest first. Dense layers see

    rank = tp + TP * (cp + CP * (dp + DP * pp))                 DP  = size / (TP * CP * PP)

and expert layers cut the same ranks of one pipeline stage as `etp + ETP * (ep + EP * edp)`. On
`cluster.accelerator: cpu` a "GPU" is one CPU rank. Knows nothing of Ray: nodes are numbered 0, 1, ... and the cluster
maps those numbers to machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import ConfigError

if TYPE_CHECKING:
    from .config.schema import Recipe

Role = Literal["train", "generation", "idle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device of the cluster: `gpu` counts within `node`."""

    node: int
    gpu: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What a device does. Colocated: every device trains, and generates in between."""

    gpu: Gpu
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    rank: int
    node: int
    gpu: int
    tp: int
    pp: int
    cp: int
    dp: int
    ep: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How one world is cut. `ep` and `etp` concern expert layers only."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1  # chunks of the model on each pipeline rank
    sequence_parallel: bool = False

    @property
    def model_parallel(self) -> int:
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All ranks of the trainer or of the generator. `dp` counts model replicas."""

    size: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    dp: int
    sequence_parallel: bool
    ranks: tuple[Rank, ...]

    @property
    def model_parallel(self) -> int:
        """Devices of one replica."""
        return self.size // self.dp

    @property
    def padding_multiple(self) -> int:
        """Padded sequence lengths divide by this: TP under sequence parallelism (each TP rank holds an equal slice of
        the tokens), times 2 x CP where the context is cut (each CP rank takes one slice from either end)."""
        return (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """`generation` is None when the trainer's processes generate too (colocated).

    `engine` is how the ranks that generate are cut: `generation`, or colocated the trainer's ranks. Where it differs
    from `train` a colocated engine needs a model of its own.
    """

    train: World
    generation: World | None
    engine: World
    placements: tuple[Placement, ...]

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Layout:
        """Raises ConfigError where a size does not divide its devices (`config.rules` says it better, and first)."""
        placements = place(recipe)
        trainers, generators = _with_role(placements, "train"), _with_role(placements, "generation")
        engine = build_world(generators or trainers, generation_sizes(recipe))
        return cls(
            train=build_world(trainers, train_sizes(recipe)),
            generation=engine if generators else None,
            engine=engine,
            placements=placements,
        )

    @property
    def num_idle(self) -> int:
        return len(_with_role(self.placements, "idle"))


def _with_role(placements: Sequence[Placement], role: Role) -> list[Gpu]:
    return [placement.gpu for placement in placements if placement.role == role]


def train_sizes(recipe: Recipe) -> Sizes:
    megatron = recipe.policy.megatron_cfg
    return Sizes(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
    )


def generation_sizes(recipe: Recipe) -> Sizes:
    """The generator's own cut: vLLM names its sizes; Megatron follows the policy's TP unless told otherwise, and its PP
    where both share their ranks and so the weights. Megatron's engine knows neither CP nor interleaved stages. How a
    backend of another package cuts its devices is its own business: they count one by one."""
    generation = recipe.policy.generation
    if generation.backend == "vllm":
        vllm = generation.vllm_cfg
        return Sizes(tp=vllm.tensor_parallel_size, pp=vllm.pipeline_parallel_size, ep=vllm.expert_parallel_size)
    if generation.backend != "megatron":
        return Sizes()
    megatron = recipe.policy.megatron_cfg
    own, shared = generation.mcore_generation_config, generation.colocated.enabled
    tp = own.tensor_model_parallel_size or megatron.tensor_model_parallel_size
    return Sizes(
        tp=tp,
        pp=own.pipeline_model_parallel_size or (megatron.pipeline_model_parallel_size if shared else 1),
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        sequence_parallel=megatron.sequence_parallel and tp > 1,
    )


def place(recipe: Recipe) -> tuple[Placement, ...]:
    """Every device of the cluster with its role, node by node. The trainer comes first (its ranks start at node 0)."""
    cluster = recipe.cluster
    return tuple(
        Placement(gpu=Gpu(node=node, gpu=gpu), role=_role(recipe, node, gpu))
        for node in range(cluster.num_nodes)
        for gpu in range(cluster.gpus_per_node)
    )


def _role(recipe: Recipe, node: int, gpu: int) -> Role:
    cluster, colocated = recipe.cluster, recipe.policy.generation.colocated
    if colocated.enabled:
        return "train"
    gpus = colocated.resources.gpus_per_node or cluster.gpus_per_node
    if cluster.num_nodes == 1:
        return "generation" if gpu >= cluster.gpus_per_node - gpus else "train"
    if node < cluster.num_nodes - (colocated.resources.num_nodes or 0):
        return "train"
    return "generation" if gpu < gpus else "idle"


def train_gpus(recipe: Recipe) -> int:
    """Number of devices that train; 0 where generation takes them all."""
    return len(_with_role(place(recipe), "train"))


def generation_gpus(recipe: Recipe) -> int:
    """Number of devices set apart for generation; 0 when it shares the trainer's."""
    return len(_with_role(place(recipe), "generation"))


def build_world(gpus: Sequence[Gpu], sizes: Sizes) -> World:
    """Ranks 0, 1, ... over `gpus` in order. Raises ConfigError unless `sizes.model_parallel` divides their number."""
    if not gpus or len(gpus) % sizes.model_parallel:
        raise ConfigError(f"tp x pp x cp = {sizes.tp} x {sizes.pp} x {sizes.cp} does not divide {len(gpus)} GPUs")
    data_parallel = len(gpus) // sizes.model_parallel
    return World(
        size=len(gpus),
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        ep=sizes.ep,
        etp=sizes.etp,
        vpp=sizes.vpp,
        dp=data_parallel,
        sequence_parallel=sizes.sequence_parallel,
        ranks=tuple(_rank(rank, gpu, sizes, data_parallel) for rank, gpu in enumerate(gpus)),
    )


def _rank(rank: int, gpu: Gpu, sizes: Sizes, data_parallel: int) -> Rank:
    rest, tp = divmod(rank, sizes.tp)
    rest, cp = divmod(rest, sizes.cp)
    pp, dp = divmod(rest, data_parallel)
    ep = rank // sizes.etp % sizes.ep
    return Rank(rank=rank, node=gpu.node, gpu=gpu.gpu, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
