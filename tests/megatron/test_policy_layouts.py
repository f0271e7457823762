"""Every parallel layout and every cut into micro-batches computes the same log-probs and the same gradient."""

import numpy as np
import pytest
import torch

from megatron_grpo.batching.shard import gather_rows
from tests.megatron.samples import (
    MODEL,
    VOCAB_SIZE,
    build_policy,
    own_rollouts,
    own_rows,
    random_rollouts,
    random_update,
    tiny_recipe,
)
from tests.megatron.world import run_world

LAYOUTS = {
    "tp2": {"size": 2, "tp": 2},
    "tp2_sequence_parallel": {"size": 2, "tp": 2, "sequence_parallel": True},
    "dp2": {"size": 2},
    "dp2_tp2": {"size": 4, "tp": 2},
}
RELATIVE = 1e-5


def full_gradients(policy) -> dict[str, tuple[np.ndarray, int | None]]:
    """This rank's part of every gradient, summed over data-parallel ranks: name -> (gradient, split dimension)."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in policy._model.buffers:
        for bucket in buffer.buckets:
            # the distributed optimizer leaves each rank only its own slice of the sum
            own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)
    return {
        name: (
            parameter.main_grad.numpy().copy(),
            parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
        )
        for name, parameter in policy.module.named_parameters()
    }


def merged(parts: list[dict[str, tuple[np.ndarray, int | None]]]) -> dict[str, np.ndarray]:
    """The tensor-parallel ranks' parts as one model."""
    whole = {}
    for name, (_, dim) in parts[0].items():
        pieces = [part[name][0] for part in parts]
        if dim is None:
            for piece in pieces[1:]:
                np.testing.assert_array_equal(piece, pieces[0], err_msg=f"replicas of {name} differ")
            whole[name] = pieces[0]
        elif name.endswith("linear_fc1.weight"):
            gates, ups = zip(*(np.split(piece, 2) for piece in pieces), strict=True)
            whole[name] = np.concatenate([*gates, *ups])
        else:
            whole[name] = np.concatenate(pieces, dim)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert not whole[name][VOCAB_SIZE:].any(), f"padded rows of {name} have gradients"
            whole[name] = whole[name][:VOCAB_SIZE]
    return whole


def score_and_differentiate(seat, recipe, rollouts, update):
    policy = build_policy(seat, recipe)
    scored = policy.score(own_rollouts(seat, rollouts))
    policy.optimizer.zero_grad()
    sums = policy._gradients(own_rows(seat, update))
    means = policy._means([sums])
    gradients = full_gradients(policy)
    policy.optimizer.adam.prepare_grads()
    norm = float(policy.optimizer.adam.get_grad_norm())
    policy.close()
    return scored.old_logprobs, gradients, means, norm


def outcome(recipe, update=None, rollouts=None, size=1, tp=1, sequence_parallel=False):
    rollouts = random_rollouts() if rollouts is None else rollouts
    update = random_update(rollouts) if update is None else update
    answers = run_world(
        score_and_differentiate, recipe, rollouts, update, size=size, tp=tp, sequence_parallel=sequence_parallel
    )
    logprobs, gradients, means, norms = zip(*answers, strict=True)
    width = rollouts.tokens.shape[1]
    scored = gather_rows(list(logprobs[::tp]), lengths=rollouts.lengths, width=width)
    return scored, merged(list(gradients[:tp])), means[0], norms


def assert_same(one, other):
    """Log-probs, gradients (relative to the largest element of each tensor), metrics and gradient norm."""
    assert np.abs(one[0] - other[0]).max() <= RELATIVE * np.abs(other[0]).max()
    assert one[1].keys() == other[1].keys()
    for name, gradient in other[1].items():
        largest = np.abs(gradient).max()
        assert largest > 0, f"{name} has no gradient"
        assert np.abs(one[1][name] - gradient).max() <= RELATIVE * largest, name
    for name, value in other[2].items():
        assert one[2][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for norm in one[3]:
        assert norm == pytest.approx(other[3][0], rel=RELATIVE)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture(scope="module")
def single_rank(tied):
    return outcome(tiny_recipe(model={"tie_word_embeddings": tied}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_log_probs_and_gradients_of_one_rank(layout, tied, single_rank):
    assert_same(outcome(tiny_recipe(model={"tie_word_embeddings": tied}), **LAYOUTS[layout]), single_rank)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_micro_batch_size_gives_the_same_gradient(size, tied, single_rank):
    recipe = tiny_recipe(model={"tie_word_embeddings": tied}, train_micro_batch_size=size, logprob_batch_size=5)
    assert_same(outcome(recipe), single_rank)


def test_the_sequence_level_loss_is_cut_the_same_way():
    rollouts = random_rollouts()
    update = random_update(rollouts, with_reference=True)
    loss = {"token_level_loss": False, "reference_policy_kl_penalty": 0.1}
    whole = outcome(tiny_recipe(loss_fn=loss, train_micro_batch_size=16), update, rollouts)
    assert_same(outcome(tiny_recipe(loss_fn=loss, train_micro_batch_size=3), update, rollouts, size=2), whole)


def test_the_start_does_not_depend_on_the_padding_of_the_vocabulary():
    """TP 4 pads 47 ids to 64 rows, one rank to 48."""
    kv_heads = {"num_key_value_heads": MODEL["num_attention_heads"]}
    assert_same(outcome(tiny_recipe(model=kv_heads), size=4, tp=4), outcome(tiny_recipe(model=kv_heads)))
