"""Which rank runs where."""

import itertools

import pytest

from megatron_grpo.errors import ConfigError
from megatron_grpo.layout import Gpu, Layout, Sizes, build_world, generation_gpus, train_gpus
from tests.unit.config.recipes import DISJOINT, VLLM, recipe

RESOURCES = "policy.generation.colocated.resources"
TP = "policy.megatron_cfg.tensor_model_parallel_size"
SEVERAL_NODES = {"cluster.num_nodes": 3, f"{RESOURCES}.num_nodes": 2}


def gpus(count, per_node=4):
    return [Gpu(node=index // per_node, gpu=index % per_node) for index in range(count)]


def where(world):
    return [(rank.node, rank.gpu) for rank in world.ranks]


def test_ranks_count_tensor_parallel_first_then_context_data_and_pipeline():
    """Megatron's order, written out: the first index moves fastest."""
    world = build_world(gpus(24), Sizes(tp=2, cp=3, pp=2))
    assert world.dp == 2
    expected = [(tp, cp, dp, pp) for pp, dp, cp, tp in itertools.product(range(2), range(2), range(3), range(2))]
    assert [(rank.tp, rank.cp, rank.dp, rank.pp) for rank in world.ranks] == expected
    assert [rank.rank for rank in world.ranks] == list(range(24))


@pytest.mark.parametrize("sizes", [Sizes(tp=2, ep=4), Sizes(tp=2, ep=2, etp=2), Sizes(tp=1, ep=4, pp=2), Sizes(ep=8)])
def test_expert_ranks_repeat_within_each_pipeline_stage(sizes):
    """Every block of ep x etp neighbouring ranks holds each expert shard once."""
    world = build_world(gpus(8), sizes)
    block = sizes.ep * sizes.etp
    for start in range(0, 8, block):
        held = [rank.ep for rank in world.ranks[start : start + block]]
        assert held == [index // sizes.etp for index in range(block)]


def test_every_place_in_the_world_is_taken_once():
    world = build_world(gpus(16), Sizes(tp=2, pp=2, cp=2))
    places = {(rank.tp, rank.pp, rank.cp, rank.dp) for rank in world.ranks}
    assert len(places) == 16 == world.size and world.dp == 2


def test_sizes_that_do_not_divide_the_gpus_are_refused():
    with pytest.raises(ConfigError, match="2 x 2 x 1 does not divide 6"):
        build_world(gpus(6), Sizes(tp=2, pp=2))
    with pytest.raises(ConfigError):
        build_world([], Sizes())
    with pytest.raises(ConfigError):
        Layout.from_recipe(recipe(DISJOINT, {f"{RESOURCES}.gpus_per_node": 4}))


def test_colocated_generation_has_no_ranks_of_its_own():
    layout = Layout.from_recipe(recipe({"cluster.num_nodes": 2, "cluster.gpus_per_node": 2}))
    assert layout.generation is None and layout.num_idle == 0
    assert where(layout.train) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_on_one_node_its_last_gpus_generate():
    layout = Layout.from_recipe(recipe(DISJOINT))
    assert where(layout.train) == [(0, 0), (0, 1)] and where(layout.generation) == [(0, 2), (0, 3)]
    assert layout.num_idle == 0


def test_on_several_nodes_whole_nodes_are_set_apart_and_unused_gpus_idle():
    layout = Layout.from_recipe(recipe(DISJOINT, SEVERAL_NODES))
    assert where(layout.train) == [(0, gpu) for gpu in range(4)]
    assert where(layout.generation) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert layout.num_idle == 4


def test_on_several_nodes_all_gpus_of_a_generation_node_are_used_by_default():
    layout = Layout.from_recipe(recipe(DISJOINT, SEVERAL_NODES, {f"{RESOURCES}.gpus_per_node": None}))
    assert layout.generation.size == 8 and layout.num_idle == 0


def test_the_guides_example():
    guide = {"cluster.num_nodes": 2, f"{RESOURCES}.num_nodes": 1}
    layout = Layout.from_recipe(recipe(VLLM, guide))
    assert layout.train.size == 4 and layout.generation.size == 2 and layout.num_idle == 2


def test_megatron_generation_is_cut_like_the_policy_unless_told_otherwise():
    layout = Layout.from_recipe(recipe(DISJOINT, {TP: 2}))
    assert (layout.train.tp, layout.train.dp) == (2, 1) and (layout.generation.tp, layout.generation.dp) == (2, 1)
    own = {"policy.generation.mcore_generation_config.tensor_model_parallel_size": 1}
    layout = Layout.from_recipe(recipe(DISJOINT, {TP: 2}, own))
    assert (layout.generation.tp, layout.generation.dp) == (1, 2)


def test_a_colocated_engine_is_cut_like_the_policy_unless_told_otherwise():
    """Equal cuts share the tensors, others need a second model."""
    four = {"cluster.gpus_per_node": 4, TP: 2, "policy.megatron_cfg.sequence_parallel": True}
    own = "policy.generation.mcore_generation_config.tensor_model_parallel_size"
    layout = Layout.from_recipe(recipe(four))
    assert layout.generation is None and layout.engine == layout.train
    layout = Layout.from_recipe(recipe(four, {own: 1}))
    assert layout.generation is None and layout.engine != layout.train
    assert (layout.engine.tp, layout.engine.dp, layout.engine.sequence_parallel) == (1, 4, False)
    assert where(layout.engine) == where(layout.train)


def test_a_disjoint_engine_is_cut_like_the_ranks_set_apart():
    layout = Layout.from_recipe(recipe(DISJOINT))
    assert layout.engine == layout.generation


def test_vllm_names_its_own_sizes():
    layout = Layout.from_recipe(recipe(VLLM, {"policy.generation.vllm_cfg.tensor_parallel_size": 2}))
    assert layout.train.tp == 1 and (layout.generation.tp, layout.generation.dp) == (2, 1)


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        (Sizes(), 1),
        (Sizes(tp=4), 1),
        (Sizes(tp=4, sequence_parallel=True), 4),
        (Sizes(cp=2), 4),
        (Sizes(tp=2, cp=2, sequence_parallel=True), 8),
    ],
)
def test_the_padding_multiple_follows_the_layout(sizes, multiple):
    assert build_world(gpus(8), sizes).padding_multiple == multiple


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_every_device_has_one_role(nodes, per_node):
    for apart, used in itertools.product(range(1, nodes + 1), range(1, per_node + 1)):
        resources = {f"{RESOURCES}.num_nodes": apart, f"{RESOURCES}.gpus_per_node": used}
        cluster = {"cluster.num_nodes": nodes, "cluster.gpus_per_node": per_node}
        chosen = recipe({"policy.generation.colocated.enabled": False}, resources, cluster)
        generating = used if nodes == 1 else apart * used
        training = per_node - used if nodes == 1 else (nodes - apart) * per_node
        assert (train_gpus(chosen), generation_gpus(chosen)) == (training, generating)
