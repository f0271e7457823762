"""Every parallel layout and every cut into micro-batches computes the same log-probs and the same gradient."""

import pytest

from tests.megatron.gradients import assert_same, cut, outcome
from tests.megatron.samples import MODEL, random_rollouts, random_update, tiny_recipe

LAYOUTS = {
    "tp2": {"size": 2, "tp": 2},
    "tp2_sequence_parallel": {"size": 2, "tp": 2, "sequence_parallel": True},
    "dp2": {"size": 2},
    "dp2_tp2": {"size": 4, "tp": 2},
    "pp2": {"size": 2, "pp": 2},
    "pp2_dp2": {"size": 4, "pp": 2},
    "pp2_tp2_sequence_parallel": {"size": 4, "pp": 2, "tp": 2, "sequence_parallel": True},
}
UNEVEN = {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}


def outcome_of(recipe, update=None, rollouts=None, **sizes):
    rollouts = random_rollouts() if rollouts is None else rollouts
    update = random_update(rollouts) if update is None else update
    return outcome(recipe, cut(**sizes), rollouts, update)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


def recipe_of(tied, **policy):
    return tiny_recipe(model={"tie_word_embeddings": tied, "num_hidden_layers": 4}, **policy)


@pytest.fixture(scope="module")
def single_rank(tied):
    return outcome_of(recipe_of(tied))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_log_probs_and_gradients_of_one_rank(layout, tied, single_rank):
    assert_same(outcome_of(recipe_of(tied), **LAYOUTS[layout]), single_rank)


def test_uneven_pipeline_stages_give_the_same(tied, single_rank):
    assert_same(outcome_of(recipe_of(tied, parallel=UNEVEN), size=3, pp=3), single_rank)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_micro_batch_size_gives_the_same_gradient(size, tied, single_rank):
    recipe = recipe_of(tied, train_micro_batch_size=size, logprob_batch_size=5)
    assert_same(outcome_of(recipe), single_rank)


def test_the_sequence_level_loss_is_cut_the_same_way():
    rollouts = random_rollouts()
    update = random_update(rollouts, with_reference=True)
    loss = {"token_level_loss": False, "reference_policy_kl_penalty": 0.1}
    whole = outcome_of(tiny_recipe(loss_fn=loss, train_micro_batch_size=16), update, rollouts)
    assert_same(outcome_of(tiny_recipe(loss_fn=loss, train_micro_batch_size=3), update, rollouts, size=2), whole)


def test_the_start_does_not_depend_on_the_padding_of_the_vocabulary():
    """TP 4 pads 47 ids to 64 rows, one rank to 48."""
    kv_heads = {"num_key_value_heads": MODEL["num_attention_heads"]}
    assert_same(outcome_of(tiny_recipe(model=kv_heads), size=4, tp=4), outcome_of(tiny_recipe(model=kv_heads)))
