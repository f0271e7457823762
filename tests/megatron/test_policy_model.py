"""The model: padded vocabulary, temperature, start values, layer pattern."""

import dataclasses

import numpy as np
import pytest

from megatron_grpo.errors import ConfigError
from megatron_grpo.platform.device import CPU
from tests.megatron.gradients import cut
from tests.megatron.samples import VOCAB_SIZE, build_policy, random_rollouts, tiny_recipe
from tests.megatron.world import run_world


def logits_both_ways(seat, recipe):
    import torch

    seat.join()
    from megatron_grpo.engines.megatron.model import build_model

    model = build_model(recipe, seat.world, VOCAB_SIZE, seat.accelerator)
    tokens = torch.from_numpy(random_rollouts(4).tokens)
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        shard = model(tokens, position_ids, None)
        gathered = model(tokens, position_ids, None, runtime_gather_output=True)
    return shard.numpy(), gathered.numpy()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_padded_ids_are_impossible_for_the_loss_and_for_the_engine(tp, tied):
    recipe = tiny_recipe(model={"tie_word_embeddings": tied})
    answers = run_world(logits_both_ways, recipe, size=tp, tp=tp)
    joined = np.concatenate([shard for shard, _ in answers], -1)
    for logits in (joined, *(gathered for _, gathered in answers)):
        assert logits.shape[-1] == 48
        assert np.isneginf(logits[..., VOCAB_SIZE:]).all() and np.isfinite(logits[..., :VOCAB_SIZE]).all()
    np.testing.assert_allclose(joined, answers[0][1], atol=1e-6)


def start_values(seat, recipe):
    seat.join()
    from megatron_grpo.engines.megatron.model import build_model

    model = build_model(recipe, seat.world, VOCAB_SIZE, seat.accelerator)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def test_the_start_has_the_stds_of_the_recipe_and_follows_its_seed():
    init = {"hidden_std": 0.2, "embedding_std": 0.3, "output_std": 0.02, "seed": 5}
    (values,) = run_world(start_values, tiny_recipe(model_init=init))
    (again,) = run_world(start_values, tiny_recipe(model_init=init))
    (other,) = run_world(start_values, tiny_recipe(model_init=init | {"seed": 6}))
    expected = {"embedding.word_embeddings.weight": 0.3, "output_layer.weight": 0.02}
    for name, value in values.items():
        np.testing.assert_array_equal(value, again[name])
        if value.ndim == 1:
            assert (value == 1).all(), name
        else:
            assert value[:VOCAB_SIZE].std() == pytest.approx(expected.get(name, 0.2), rel=0.1), name
            assert not np.array_equal(value, other[name]), name
    assert not values["output_layer.weight"][VOCAB_SIZE:].any()


def test_the_hidden_std_defaults_to_the_inverse_root_of_the_width():
    (values,) = run_world(start_values, tiny_recipe(model={"hidden_size": 64}))
    assert values["decoder.layers.0.self_attention.linear_qkv.weight"].std() == pytest.approx(64**-0.5, rel=0.1)


def scores_of(seat, recipe, rollouts):
    return build_policy(seat, recipe).score(rollouts).old_logprobs


def test_scores_are_aligned_with_their_tokens():
    rollouts = random_rollouts()
    (logprobs,) = run_world(scores_of, tiny_recipe(), rollouts)
    is_token = np.arange(rollouts.tokens.shape[1]) < rollouts.lengths[:, None]
    assert (logprobs[:, 0] == 0).all() and (logprobs[~is_token] == 0).all()
    assert (logprobs[:, 1:][is_token[:, 1:]] < 0).all()
    # a row's later tokens do not move its earlier scores; its own token moves its score
    changed = rollouts.tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB_SIZE
    (moved,) = run_world(scores_of, tiny_recipe(), dataclasses.replace(rollouts, tokens=changed))
    np.testing.assert_allclose(moved[:, :4], logprobs[:, :4], atol=1e-6)
    assert (moved[:, 4] != logprobs[:, 4]).all()


def test_padding_does_not_change_scores():
    rollouts = random_rollouts()
    pad = ((0, 0), (0, 6))
    wider = dataclasses.replace(
        rollouts,
        tokens=np.pad(rollouts.tokens, pad, constant_values=3),
        loss_mask=np.pad(rollouts.loss_mask, pad),
        generation_logprobs=np.pad(rollouts.generation_logprobs, pad),
    )
    (narrow,) = run_world(scores_of, tiny_recipe(), rollouts)
    (wide,) = run_world(scores_of, tiny_recipe(logprob_batch_size=16), wider)
    np.testing.assert_allclose(wide[:, : narrow.shape[1]], narrow, atol=1e-6)
    assert wide.shape == wider.tokens.shape and not wide[:, narrow.shape[1] :].any()


def test_temperature_divides_the_logits():
    rollouts = random_rollouts()
    (cool,) = run_world(scores_of, tiny_recipe(temperature=0.5, model_init={"output_std": 0.3}), rollouts)
    (scaled,) = run_world(scores_of, tiny_recipe(model_init={"output_std": 0.6}), rollouts)
    np.testing.assert_allclose(cool, scaled, atol=1e-5)  # twice the output weights are twice the logits


def test_layers_alternate_and_stages_are_separated():
    from megatron_grpo.engines.megatron.model import layer_pattern, layers_of_chunks

    assert layer_pattern((4,)) == "*-*-*-*-"
    assert layer_pattern((2, 1)) == "*-*-|*-"
    with pytest.raises(ConfigError, match="3 layers do not divide into 2 stages"):
        layers_of_chunks(tiny_recipe(model={"num_hidden_layers": 3}), cut(2, pp=2))


def test_the_layer_spec_is_local_without_transformer_engine():
    from megatron_grpo.engines.megatron.layers import active_layer_spec
    from megatron_grpo.engines.megatron.optimizer import active_adam

    assert active_layer_spec("auto", CPU) == active_layer_spec("local", CPU) == "local"
    with pytest.raises(ConfigError, match=r"layer_spec is te"):
        active_layer_spec("te", CPU)
    assert active_adam() == "torch"
