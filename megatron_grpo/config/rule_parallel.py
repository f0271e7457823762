"""Rules on the parallel layout: the cluster's devices against TP, PP, CP, EP, and those against the model's shape."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import generation_gpus, generation_sizes, train_gpus, train_sizes
from .facts import Facts
from .schema import Recipe

MEGATRON = "policy.megatron_cfg"
TP = f"{MEGATRON}.tensor_model_parallel_size"
RESOURCES = "policy.generation.colocated.resources"
DISJOINT = "policy.generation.colocated.enabled is false"


def one_node_leaves_gpus_for_training(recipe: Recipe, _: Facts) -> Iterator[str]:
    colocated, total = recipe.policy.generation.colocated, recipe.cluster.gpus_per_node
    if colocated.enabled or recipe.cluster.num_nodes != 1:
        return
    gpus, nodes = colocated.resources.gpus_per_node, colocated.resources.num_nodes
    if nodes not in (None, 1):
        yield f"{RESOURCES}.num_nodes is {nodes}, but cluster.num_nodes is 1: leave it out"
    if gpus is None:
        yield f"{RESOURCES}.gpus_per_node must say how many of the node's {total} GPUs generate ({DISJOINT})"
    elif gpus >= total:
        yield (
            f"{RESOURCES}.gpus_per_node is {gpus} of cluster.gpus_per_node = {total}: 0 GPUs left for training, at "
            "least one must train"
        )


def several_nodes_leave_nodes_for_training(recipe: Recipe, _: Facts) -> Iterator[str]:
    colocated, cluster = recipe.policy.generation.colocated, recipe.cluster
    if colocated.enabled or cluster.num_nodes == 1:
        return
    gpus, nodes = colocated.resources.gpus_per_node, colocated.resources.num_nodes
    if nodes is None:
        yield f"{RESOURCES}.num_nodes must say how many of the {cluster.num_nodes} nodes generate ({DISJOINT})"
    elif nodes >= cluster.num_nodes:
        yield (
            f"{RESOURCES}.num_nodes is {nodes} of cluster.num_nodes = {cluster.num_nodes}: 0 GPUs left for training, "
            "at least one node must train"
        )
    if gpus is not None and gpus > cluster.gpus_per_node:
        yield f"{RESOURCES}.gpus_per_node is {gpus}, but cluster.gpus_per_node is {cluster.gpus_per_node}"


def model_parallel_divides_training_gpus(recipe: Recipe, _: Facts) -> Iterator[str]:
    gpus, sizes = train_gpus(recipe), train_sizes(recipe)
    total = recipe.cluster.num_nodes * recipe.cluster.gpus_per_node
    if gpus > 0 and gpus % sizes.model_parallel:
        yield (
            f"{TP} x {MEGATRON}.pipeline_model_parallel_size x {MEGATRON}.context_parallel_size = "
            f"{sizes.tp} x {sizes.pp} x {sizes.cp} = {sizes.model_parallel} does not divide the {gpus} training GPUs "
            f"(training GPUs = {total} in the cluster - {total - gpus} set apart for generation)"
        )


def expert_parallel_divides_training_gpus(recipe: Recipe, _: Facts) -> Iterator[str]:
    gpus, sizes = train_gpus(recipe), train_sizes(recipe)
    block = sizes.ep * sizes.etp * sizes.pp
    if gpus > 0 and sizes.ep * sizes.etp > 1 and gpus % block:
        yield (
            f"{MEGATRON}.expert_model_parallel_size x {MEGATRON}.expert_tensor_parallel_size x "
            f"{MEGATRON}.pipeline_model_parallel_size = {sizes.ep} x {sizes.etp} x {sizes.pp} = {block} does not "
            f"divide the {gpus} training GPUs"
        )


def generation_parallel_divides_its_gpus(recipe: Recipe, _: Facts) -> Iterator[str]:
    gpus, sizes = generation_gpus(recipe), generation_sizes(recipe)
    where = f"{RESOURCES}.num_nodes, gpus_per_node"
    if gpus == 0 and sizes.model_parallel != train_sizes(recipe).model_parallel:
        gpus, where = train_gpus(recipe), "colocated: those that train"
    if gpus > 0 and gpus % sizes.model_parallel:
        stages = f" x {generation_pp_key(recipe)}" if sizes.pp > 1 and recipe.policy.generation.backend != "vllm" else ""
        yield (
            f"{_generation_tp_key(recipe)}{stages} = {sizes.model_parallel} does not divide the {gpus} GPUs that "
            f"generate ({where})"
        )


def _generation_tp_key(recipe: Recipe) -> str:
    generation = recipe.policy.generation
    if generation.backend == "vllm":
        return "policy.generation.vllm_cfg.tensor_parallel_size x pipeline_parallel_size"
    if generation.mcore_generation_config.tensor_model_parallel_size is not None:
        return "policy.generation.mcore_generation_config.tensor_model_parallel_size"
    return f"{TP} (which the generator shares)"


def generation_pp_key(recipe: Recipe) -> str:
    if recipe.policy.generation.mcore_generation_config.pipeline_model_parallel_size is not None:
        return "policy.generation.mcore_generation_config.pipeline_model_parallel_size"
    return f"{MEGATRON}.pipeline_model_parallel_size (which the generator shares)"


def tensor_parallel_divides_heads(recipe: Recipe, facts: Facts) -> Iterator[str]:
    heads = facts.model.num_attention_heads if facts.model else None
    for key, tp in _tensor_parallel_sizes(recipe):
        if heads and heads % tp:
            yield _uneven_heads(key, tp, f"{heads} attention heads (num_attention_heads)", heads)


def tensor_parallel_divides_kv_heads(recipe: Recipe, facts: Facts) -> Iterator[str]:
    heads = facts.model.num_key_value_heads if facts.model else None
    for key, tp in _tensor_parallel_sizes(recipe):
        if not heads:
            continue
        named = f"{heads} key/value heads (num_key_value_heads)"
        if tp > heads:
            yield f"{key} = {tp} exceeds the model's {named}; replicating them is not supported"
        elif heads % tp:
            yield _uneven_heads(key, tp, named, heads)


def _uneven_heads(key: str, tp: int, named: str, heads: int) -> str:
    valid = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
    return f"{key} = {tp} does not divide the model's {named}; valid sizes: {valid}"


def _tensor_parallel_sizes(recipe: Recipe) -> list[tuple[str, int]]:
    train, generation = train_sizes(recipe).tp, generation_sizes(recipe).tp
    sizes = [(TP, train)]
    return sizes if generation == train else [*sizes, (_generation_tp_key(recipe), generation)]


def inline_heads_form_groups(recipe: Recipe, _: Facts) -> Iterator[str]:
    model = recipe.policy.architecture
    if model is not None and model.num_attention_heads % model.num_key_value_heads:
        yield (
            f"policy.model_config.num_attention_heads = {model.num_attention_heads} is not divisible by "
            f"policy.model_config.num_key_value_heads = {model.num_key_value_heads}"
        )


def rotary_heads_are_even(recipe: Recipe, _: Facts) -> Iterator[str]:
    model = recipe.policy.architecture
    if model is not None and model.head_dim % 2:
        yield f"policy.model_config.head_dim = {model.head_dim} must be even: rotary embeddings turn pairs"


def expert_parallel_divides_experts(recipe: Recipe, facts: Facts) -> Iterator[str]:
    size, key = recipe.policy.megatron_cfg.expert_model_parallel_size, f"{MEGATRON}.expert_model_parallel_size"
    if facts.model is None or size == 1:
        return
    if facts.model.num_experts is None:
        yield f"{key} = {size}, but the model has no experts"
    elif facts.model.num_experts % size:
        yield f"{key} = {size} does not divide the model's {facts.model.num_experts} experts (num_experts)"


def sequence_parallel_needs_tensor_parallel(recipe: Recipe, _: Facts) -> Iterator[str]:
    sizes = train_sizes(recipe)
    if sizes.sequence_parallel and sizes.tp == 1:
        yield f"{MEGATRON}.sequence_parallel: true needs {TP} > 1"


def experts_under_tensor_parallel_need_sequence_parallel(recipe: Recipe, _: Facts) -> Iterator[str]:
    """Megatron-Core refuses expert parallelism beside tensor parallelism without it."""
    sizes = train_sizes(recipe)
    if sizes.ep > 1 and sizes.tp > 1 and not sizes.sequence_parallel:
        yield f"{MEGATRON}.expert_model_parallel_size > 1 with {TP} > 1 needs {MEGATRON}.sequence_parallel: true"


def segments_tile_the_cluster(recipe: Recipe, _: Facts) -> Iterator[str]:
    segment, nodes = recipe.cluster.segment_size, recipe.cluster.num_nodes
    if segment is not None and nodes % segment:
        yield f"cluster.segment_size = {segment} does not divide cluster.num_nodes = {nodes}"
