"""Saves and resumes of a policy: what comes back, in which layouts, and what a failure says."""

import resource
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from megatron_grpo.errors import CheckpointError
from tests.megatron.gradients import cut
from tests.megatron.samples import (
    own_rollouts,
    own_rows,
    random_rollouts,
    random_solutions,
    random_update,
    tiny_recipe,
)
from tests.megatron.world import run_world

VOCAB_SIZE = 50  # padded to 56 at TP 1, to 64 at TP 2
SCHEDULE = {"lr_warmup_iters": 8, "lr_warmup_init": 1e-4}
UPDATES = [random_update(random_rollouts(seed=seed), seed) for seed in range(5)]


def build(seat, recipe):
    from megatron_grpo.engines.megatron.checkpoint import PolicyCheckpoint
    from megatron_grpo.engines.megatron.policy import MegatronPolicy

    policy = MegatronPolicy(
        recipe, seat.world, seat.rank, seat.rendezvous, vocab_size=VOCAB_SIZE, accelerator=seat.accelerator
    )
    return policy, PolicyCheckpoint(policy)


def train(seat, policy, updates):
    return [policy.train([own_rows(seat, update)]) for update in updates]


def state_of(policy) -> dict[str, list[np.ndarray]]:
    """This rank's weights, moments, main parameters and steps."""
    moments, main = [], []
    for one in policy.optimizer.adam.chained_optimizers:
        for parameter in one.get_parameters():
            main.append(parameter.detach().numpy().copy())
            state = one.optimizer.state[parameter]
            moments += [state[key].numpy().copy() for key in ("exp_avg", "exp_avg_sq", "step")]
    weights = [parameter.detach().float().numpy().copy() for parameter in policy.module.parameters()]
    return {"weights": weights, "moments": moments, "main": main}


def draw() -> list[float]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(2).tolist()
    return tracked + torch.rand(2).tolist()


def trained_during_the_save(seat, recipe, path):
    """Two updates, a save whose writer starts only after three more; what these three gave."""
    policy, checkpoint = build(seat, recipe)
    train(seat, policy, UPDATES[:2])
    go_on = threading.Event()
    checkpoint._writer.submit(go_on.wait)
    checkpoint.begin_save(path)
    random = draw()
    results = train(seat, policy, UPDATES[2:])
    assert not checkpoint.finish(blocking=False)
    go_on.set()
    assert checkpoint.finish(blocking=True) and checkpoint.finish(blocking=False)
    checkpoint.close()
    assert not psutil.Process().children(recursive=True)
    assert not [thread for thread in threading.enumerate() if "checkpoint" in thread.name]
    return results, state_of(policy), random


def resumed(seat, recipe, path):
    policy, checkpoint = build(seat, recipe)
    train(seat, policy, UPDATES[3:4])
    storages = [parameter.data_ptr() for parameter in policy.module.parameters()]
    checkpoint.load(path)
    assert storages == [parameter.data_ptr() for parameter in policy.module.parameters()]
    random = draw()
    return train(seat, policy, UPDATES[2:]), state_of(policy), random


def other_start(**recipe):
    """The same model from other weights, so that what is compared can only come from the checkpoint."""
    return tiny_recipe(scheduler=SCHEDULE, model_init={"seed": 77}, **recipe)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (1, {"precision": "bfloat16"}),
        (1, {"optimizer": {"use_distributed_optimizer": False}}),
    ],
    ids=["dp2", "bfloat16", "plain_adam"],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, size, options):
    recipe = tiny_recipe(scheduler=SCHEDULE, **options)
    uninterrupted = run_world(trained_during_the_save, recipe, tmp_path, size=size)
    again = run_world(resumed, other_start(**options), tmp_path, size=size)
    for (results, state, random), (their_results, their_state, their_random) in zip(uninterrupted, again, strict=True):
        for one, other in zip(results, their_results, strict=True):
            assert other.metrics == pytest.approx(one.metrics, abs=1e-6, rel=1e-6)
            assert other.learning_rate == one.learning_rate
        for kind, values in state.items():
            for value, theirs in zip(values, their_state[kind], strict=True):
                np.testing.assert_array_equal(theirs, value, err_msg=kind)
        assert their_random == random


def saved(seat, recipe, path):
    policy, checkpoint = build(seat, recipe)
    train(seat, policy, UPDATES[:2])
    checkpoint.save(path)
    return train(seat, policy, UPDATES[2:]), policy.score(own_rollouts(seat, random_rollouts())).old_logprobs


def resumed_elsewhere(seat, recipe, path):
    policy, checkpoint = build(seat, recipe)
    checkpoint.load(path)
    return train(seat, policy, UPDATES[2:]), policy.score(own_rollouts(seat, random_rollouts())).old_logprobs


@pytest.mark.parametrize(
    "there", [cut(2, tp=2), cut(2), cut(4, tp=2), cut(4, pp=2)], ids=["tp2", "dp2", "tp2dp2", "pp2dp2"]
)
def test_a_run_resumes_in_another_layout_and_comes_back(tmp_path, there):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    ((results, logprobs),) = run_world(saved, tiny_recipe(scheduler=SCHEDULE), tmp_path / "one")
    many = run_world(resumed_elsewhere, other_start(), tmp_path / "one", world=there)
    run_world(saved, tiny_recipe(scheduler=SCHEDULE), tmp_path / "many", world=there)
    back = run_world(resumed_elsewhere, other_start(), tmp_path / "many")
    for others, _ in [*many[-1:], *back]:  # the last rank holds the output layer
        for one, other in zip(results, others, strict=True):
            assert other.metrics["loss"] == pytest.approx(one.metrics["loss"], abs=1e-5)
            assert other.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-5)
            assert other.learning_rate == one.learning_rate
    np.testing.assert_allclose(back[0][1], logprobs, atol=1e-5)


def with_reference(seat, recipe, path):
    policy, checkpoint = build(seat, recipe)
    policy.warm_start([random_solutions()] * 3, lr=5e-3)
    policy.finish_warm_start()
    update = random_update(random_rollouts(), with_reference=True)
    policy.train([own_rows(seat, update)])
    checkpoint.save(path)
    return policy.score(random_rollouts())


def rescored(seat, recipe, path):
    policy, checkpoint = build(seat, recipe)
    checkpoint.load(path)
    return policy.score(random_rollouts())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_reference_of_a_warm_start_survives(tmp_path, tp):
    kl = {"loss_fn": {"reference_policy_kl_penalty": 0.1}}
    (before,) = run_world(with_reference, tiny_recipe(**kl), tmp_path)
    assert np.abs(before.reference_logprobs - before.old_logprobs).max() > 1e-3
    for after in run_world(rescored, other_start(**kl), tmp_path, size=tp, tp=tp):
        np.testing.assert_allclose(after.reference_logprobs, before.reference_logprobs, atol=1e-5)
        np.testing.assert_allclose(after.old_logprobs, before.old_logprobs, atol=1e-5)


def next_rate(seat, recipe, path):
    policy, checkpoint = build(seat, recipe)
    checkpoint.load(path)
    return policy.optimizer.position, policy.train([UPDATES[0]]).learning_rate


def test_a_resumed_run_takes_its_rates_from_its_own_recipe(tmp_path):
    run_world(saved, tiny_recipe(scheduler=SCHEDULE), tmp_path)
    (taken,) = run_world(
        next_rate,
        tiny_recipe(scheduler={"lr_warmup_iters": 4, "lr_warmup_init": 0.0}, optimizer={"lr": 2e-4}),
        tmp_path,
    )
    assert taken == (2, pytest.approx(2e-4 * 2 / 4))


def from_the_start(seat, recipe, path, first_call):
    """Everything trained; before it the checkpoint's method of that name is called, or None."""
    policy, checkpoint = build(seat, recipe)
    {"save": checkpoint.save, "load": checkpoint.load, None: Path}[first_call](path)
    train(seat, policy, UPDATES)
    return state_of(policy)


def test_a_save_before_the_first_update_changes_nothing_and_is_read(tmp_path):
    (state,) = run_world(from_the_start, tiny_recipe(), tmp_path, "save")
    (plain,) = run_world(from_the_start, tiny_recipe(), tmp_path, None)
    (theirs,) = run_world(from_the_start, tiny_recipe(model_init={"seed": 77}), tmp_path, "load")
    for kind, values in plain.items():
        for value, one, other in zip(values, state[kind], theirs[kind], strict=True):
            np.testing.assert_array_equal(one, value, err_msg=kind)
            np.testing.assert_array_equal(other, value, err_msg=kind)


def refusal(function, *args) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args)
    return str(caught.value)


def saves_that_fail(seat, recipe, path: Path):
    """No directory; a disk that is full on rank 1 alone; a directory that vanishes; the same directory twice."""
    policy, checkpoint = build(seat, recipe)
    train(seat, policy, UPDATES[:1])
    messages = [refusal(checkpoint.save, path / "absent")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if seat.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    messages.append(refusal(checkpoint.save, path / "full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    go_on = threading.Event()
    checkpoint._writer.submit(go_on.wait)
    checkpoint.begin_save(path / "vanishes")
    if seat.rank == 0:
        (path / "vanishes").rmdir()
    torch.distributed.barrier()
    go_on.set()
    messages.append(refusal(lambda: checkpoint.finish(blocking=True)))
    checkpoint.save(path / "good")
    messages.append(refusal(checkpoint.save, path / "good"))
    checkpoint.close()
    return messages


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(tmp_path):
    for name in ("full", "vanishes", "good"):
        (tmp_path / name).mkdir()
    for absent, full, vanished, twice in run_world(saves_that_fail, tiny_recipe(), tmp_path, size=2, tp=2):
        assert str(tmp_path / "absent") in absent and "the directory does not exist" in absent
        assert str(tmp_path / "full") in full and "(rank 1)" in full and "free some space" in full
        assert str(tmp_path / "vanishes") in vanished and "(rank 0, 1)" in vanished and "No such file" in vanished
        assert str(tmp_path / "good") in twice and "holds a checkpoint already" in twice


def loads_that_fail(seat, recipe, paths):
    _, checkpoint = build(seat, recipe)
    return [refusal(checkpoint.load, path) for path in paths]


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(tmp_path):
    cases = ["short", "empty", "no_file", "no_index", "cut_index", "unfinished"]
    for name in cases:
        (tmp_path / name).mkdir()
    run_world(saved_in_each, tiny_recipe(), [tmp_path / name for name in cases])
    data = "__0_0.distcp"
    _cut(tmp_path / "short" / data, 0.9)
    _cut(tmp_path / "empty" / data, 0.0)
    (tmp_path / "no_file" / data).unlink()
    (tmp_path / "no_index" / ".metadata").unlink()
    _cut(tmp_path / "cut_index" / ".metadata", 0.5)
    (tmp_path / "unfinished" / "metadata.json").unlink()
    cases.append("absent")
    for messages in run_world(loads_that_fail, tiny_recipe(), [tmp_path / name for name in cases], size=2):
        told = dict(zip(cases, messages, strict=True))
        for name, message in told.items():
            assert str(tmp_path / name) in message and "(rank 0, 1)" in message, message
        assert "is truncated" in told["short"] and "0 bytes of" in told["empty"]
        assert data in told["no_file"] and ".metadata" in told["no_index"]
        assert "move this checkpoint away" in told["cut_index"]
        assert "not a distributed checkpoint" in told["unfinished"]


def saved_in_each(seat, recipe, paths):
    _, checkpoint = build(seat, recipe)
    for path in paths:
        checkpoint.save(path)


def _cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def test_a_checkpoint_of_another_model_or_without_the_reference_is_refused(tmp_path):
    run_world(saved_in_each, tiny_recipe(), [tmp_path])
    (message,) = run_world(loads_that_fail, tiny_recipe(model={"intermediate_size": 64}), [tmp_path])[0]
    assert "shape mismatch" in message
    (message,) = run_world(
        loads_that_fail, tiny_recipe(loss_fn={"reference_policy_kl_penalty": 0.1}), [tmp_path], size=2
    )[1]
    assert "no reference weights" in message and "reference_policy_kl_penalty" in message
