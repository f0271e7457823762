"""The mapping: every weight once, exact inverses, whole names from local ones."""

import pytest
import torch

from megatron_grpo.conversion.architecture import FAMILIES, LlamaRopeScaling, architecture_of, config_of
from megatron_grpo.conversion.families import TABLES
from megatron_grpo.conversion.layouts import GatedHalves, Plain, QueryGroups
from megatron_grpo.conversion.mapping import WeightMapping, global_name
from megatron_grpo.errors import ConversionError

CONFIG = {
    "vocab_size": 21,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": [1]}


def architecture(family="qwen3", **changes):
    extra = EXPERTS if FAMILIES[family].has_experts else {}
    return architecture_of(CONFIG | extra | {"model_type": family} | changes)


def hf_tensors(mapping):
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in mapping.hf_shapes.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_there_and_back_is_bit_equal_for_any_tensor_parallel_size(family, tied):
    mapping = WeightMapping(architecture(family, tie_word_embeddings=tied))
    given, found = hf_tensors(mapping), {}
    for weight in mapping.weights:
        whole = weight.from_hf(given, padded_vocab_size=32)
        assert tuple(whole.shape) == ((32, 8) if weight.is_vocabulary else weight.shape)
        for size in (1, 2, 4):
            shards = [weight.shard(whole, rank, size) for rank in range(size)]
            assert torch.equal(weight.gather(shards), whole), weight.name
        found |= weight.to_hf(whole)
    assert found.keys() == given.keys() and ("lm_head.weight" in given) is not tied
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert all(mapping.of_hf(name) is weight for weight in mapping.weights for name in weight.hf)


def test_query_key_and_value_rows_are_interleaved_by_group():
    q, k, v = (torch.tensor(rows) for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    layout = QueryGroups(num_groups=2, heads_per_group=2)
    whole = layout.join([q, k, v])
    assert whole.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert layout.shard(whole, 1, 2).tolist() == [2, 3, 11, 21]
    assert layout.shard(whole, 1, 4).tolist() == [10, 20]  # fewer groups than ranks: a part of a group


def test_a_rank_holds_its_part_of_the_gate_above_its_part_of_the_up_projection():
    layout = GatedHalves()
    whole = layout.join([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])])
    assert layout.shard(whole, 1, 2).tolist() == [2, 3, 12, 13]


def test_a_size_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"5 rows .* for 2"):
        Plain(0).shard(torch.zeros(5, 2), 0, 2)


def test_pipeline_and_expert_offsets_make_a_whole_name():
    assert global_name("decoder.layers.1.mlp.router.weight", [4, 5]) == "decoder.layers.5.mlp.router.weight"
    local = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    whole = "decoder.layers.5.mlp.experts.local_experts.3.linear_fc2.weight"
    assert global_name(local, [4, 5], first_expert=2) == whole
    assert global_name("decoder.layers.1.mlp.experts.linear_fc2.weight1", [4, 5], first_expert=2) == whole
    assert global_name("embedding.word_embeddings.weight", []) == "embedding.word_embeddings.weight"
    with pytest.raises(ValueError, match="2 layers"):
        global_name("decoder.layers.2.mlp.router.weight", [4, 5])


def test_fused_norms_have_the_names_of_local_modules():
    mapping = WeightMapping(architecture("llama"))
    norm = mapping.of("decoder.layers.2.self_attention.linear_qkv.layer_norm_weight")
    assert list(norm.hf) == ["model.layers.1.input_layernorm.weight"]
    norm = mapping.of("decoder.layers.3.mlp.linear_fc1.layer_norm_weight")
    assert list(norm.hf) == ["model.layers.1.post_attention_layernorm.weight"]


def test_the_copy_of_a_tied_embedding_is_known_as_one():
    tied, untied = (WeightMapping(architecture(tie_word_embeddings=tied)) for tied in (True, False))
    assert tied.is_copy("output_layer.weight") and not untied.is_copy("output_layer.weight")
    assert list(tied.of("output_layer.weight").hf) == ["model.embed_tokens.weight"]
    assert list(untied.of("output_layer.weight").hf) == ["lm_head.weight"]


def test_a_wrong_shape_and_a_missing_tensor_are_named():
    mapping = WeightMapping(architecture("qwen2"))
    weight = mapping.of("decoder.layers.0.self_attention.linear_qkv.bias")
    tensors = hf_tensors(mapping)
    with pytest.raises(ConversionError, match=r"layers\.0\.self_attn\.k_proj\.bias has shape 3, expected 12"):
        weight.from_hf(tensors | {"model.layers.0.self_attn.k_proj.bias": torch.zeros(3)})
    del tensors["model.layers.0.self_attn.q_proj.bias"]
    with pytest.raises(ConversionError, match=r"q_proj\.bias is missing"):
        weight.from_hf(tensors)
    with pytest.raises(ConversionError, match="has shape 4, expected 48"):
        weight.to_hf(torch.zeros(4))
    with pytest.raises(ConversionError, match="no parameter of the family qwen2"):
        mapping.of("decoder.layers.0.self_attention.q_layernorm.weight")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_written_configuration_is_read_as_the_same_architecture(family):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = architecture(family, rope_scaling=scaling | {"original_max_position_embeddings": 64}, rope_theta=5e5)
    assert isinstance(scaled.rope_scaling, LlamaRopeScaling) and scaled.rope_theta == 5e5
    for known in (scaled, architecture(family)):
        assert architecture_of(config_of(known, "bfloat16")) == known


def test_every_family_has_a_table():
    assert TABLES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["'gpt2'", "qwen3"]),
        ({"model_type": None}, ["None"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["linear", "factor"]),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_key(changes, words):
    with pytest.raises(ConversionError) as refused:
        architecture(**changes)
    assert all(word in str(refused.value) for word in words)


def test_both_spellings_of_rope_are_read():
    assert architecture(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    assert architecture(rope_theta=7.0, rope_scaling=None).rope_theta == 7.0
