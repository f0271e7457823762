"""Weights from a trainer's world to a generator's: every layout exact, every failure named within the deadline."""

import asyncio
import time

import numpy as np
import pytest
import torch

from megatron_grpo.errors import WeightSyncFailed
from megatron_grpo.types import Sampling
from tests.megatron import generation as g
from tests.megatron.world import Seat, free_address, run_world, small_world

PROMPT = [3, 5, 7, 9, 11]


class Sides:
    """Two worlds in one run of processes: the first ranks train, the others generate."""

    def __init__(self, *, policy_tp, policy_dp=1, generation_tp=1, generation_dp=1, timeout_s=20.0):
        self.num_policy, self.num_generation = policy_tp * policy_dp, generation_tp * generation_dp
        self.tps = policy_tp, generation_tp
        self.timeout_s = timeout_s
        self.worlds = [free_address(), free_address()]
        self.transfers = [free_address() for _ in range(3)]

    @property
    def size(self):
        return self.num_policy + self.num_generation

    def is_policy(self, seat):
        return seat.rank < self.num_policy

    def own_seat(self, seat):
        side = 0 if self.is_policy(seat) else 1
        size = (self.num_policy, self.num_generation)[side]
        rank = seat.rank - side * self.num_policy
        return Seat(world=small_world(size, self.tps[side]), rank=rank, rendezvous=self.worlds[side])

    def config(self, seat):
        return g.recipe(tp=self.tps[0], tensor_model_parallel_size=self.tps[1], timeout_s=self.timeout_s)

    def module(self, seat):
        config = self.config(seat)
        config = config.model_copy(
            update={
                "policy": config.policy.model_copy(
                    update={"model_init": config.policy.model_init.model_copy(update={"seed": 1 + self.is_policy(seat)})}
                )
            }
        )
        return g.build_module(self.own_seat(seat), config)

    def transfer(self, seat, module, attempt=0, timeout_s=None):
        from megatron_grpo.weight_sync.transfer import WeightTransfer

        return WeightTransfer(
            module, self.transfer_seat(seat, attempt), backend="gloo", timeout_s=timeout_s or self.timeout_s
        )

    def transfer_seat(self, seat, attempt=0):
        from megatron_grpo.weight_sync.seat import Seat as TransferSeat

        address = self.transfers[attempt]
        return TransferSeat(
            host=address.host,
            port=address.port,
            rank=seat.rank,
            num_policy=self.num_policy,
            num_generation=self.num_generation,
        )


def logits_after_transfers(seat, sides):
    """Logits of a fixed sequence on each rank after each of two transfers, the weights changed in between."""
    module = sides.module(seat)
    transfer = sides.transfer(seat, module)
    move = transfer.send if sides.is_policy(seat) else transfer.receive
    before = g.full_logits(module, PROMPT).numpy()
    move()
    first = g.full_logits(module, PROMPT).numpy()
    if sides.is_policy(seat):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.3)
    move()
    second = g.full_logits(module, PROMPT).numpy()
    transfer.close()
    return before, first, second


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ({"policy_tp": 1}, 0.0),
        ({"policy_tp": 2}, 2e-5),
        ({"policy_tp": 2, "generation_tp": 2}, 0.0),
        ({"policy_tp": 1, "policy_dp": 2, "generation_tp": 2}, 2e-5),
        ({"policy_tp": 1, "generation_dp": 2}, 0.0),
        ({"policy_tp": 2, "policy_dp": 2, "generation_dp": 2}, 2e-5),
        ({"policy_tp": 1, "generation_tp": 4}, 2e-5),
    ],
    ids=str,
)
def test_the_generator_holds_what_the_trainer_sent(layout, tolerance):
    sides = Sides(**layout)
    answers = run_world(logits_after_transfers, sides, size=sides.size)
    trainer, generators = answers[0], answers[sides.num_policy :]
    for generator in generators:
        assert np.abs(generator[0] - trainer[0]).max() > 0.1, "the two sides began with equal weights"
        for got, expected in zip(generator[1:], trainer[1:], strict=True):
            # the weights are equal to the bit (checksums); other layouts add up in another order
            assert np.abs(got - expected).max() <= tolerance


def engine_after_transfer(seat, sides):
    """The generator samples before and after a transfer that happens while one request is under way."""
    from megatron_grpo.engines.megatron.inference import MegatronGeneration

    module = sides.module(seat)
    if sides.is_policy(seat):
        sides.transfer(seat, module).send()
        return None
    own, config = sides.own_seat(seat), sides.config(seat)
    engine = MegatronGeneration(module, config, own.world, own.rank, vocab_size=g.VOCAB, eos_id=g.EOS)
    transfer = sides.transfer(seat, module)

    async def ask(name):
        return (
            await engine.generate(PROMPT, num_generations=1, sampling=Sampling(max_new_tokens=12), request_id=name)
        )[0]

    async def scenario():
        old = await ask("old")
        old_error = np.abs(old.logprobs - g.reference_logprobs(module, PROMPT, old.token_ids)).max()
        await engine.pause()
        await asyncio.to_thread(transfer.receive)
        await engine.set_version(1)
        await engine.resume()
        new = await ask("new")
        new_error = np.abs(new.logprobs - g.reference_logprobs(module, PROMPT, new.token_ids)).max()
        return float(old_error), float(new_error), old.token_versions.tolist(), new.token_versions.tolist()

    result = asyncio.run(scenario())
    engine.close()
    return result


def test_a_paused_engine_samples_from_the_received_weights():
    sides = Sides(policy_tp=1)
    old_error, new_error, old, new = run_world(engine_after_transfer, sides, size=2)[1]
    assert old_error <= 1e-5 and new_error <= 1e-5
    assert set(old) == {0} and set(new) == {1}


def peer_missing(seat, sides):
    module = sides.module(seat)
    if not sides.is_policy(seat):
        time.sleep(3)
        return None
    begin = time.monotonic()
    with pytest.raises(WeightSyncFailed) as error:
        sides.transfer(seat, module, timeout_s=1.5)
    return time.monotonic() - begin, str(error.value)


def test_a_peer_that_never_joins_fails_within_the_deadline():
    sides = Sides(policy_tp=1)
    waited, message = run_world(peer_missing, sides, size=2)[0]
    assert 1.0 < waited < 3.0
    assert "join the transfer group" in message and "timeouts.refit = 1.5 s" in message


def peer_late_then_retry(seat, sides):
    """The generator misses one transfer; both then join again and the weights arrive."""
    module = sides.module(seat)
    kept = g.full_logits(module, PROMPT)
    transfer = sides.transfer(seat, module, timeout_s=2.0)
    begin = time.monotonic()
    if sides.is_policy(seat):
        with pytest.raises(WeightSyncFailed, match="send weights"):
            transfer.send()
    else:
        time.sleep(3.0)
        with pytest.raises(WeightSyncFailed, match="receive weights"):
            transfer.receive()
        assert torch.equal(g.full_logits(module, PROMPT), kept)
    waited = time.monotonic() - begin
    with pytest.raises(WeightSyncFailed, match="not joined again"):
        (transfer.send if sides.is_policy(seat) else transfer.receive)()
    transfer = sides.transfer(seat, module, attempt=1)
    (transfer.send if sides.is_policy(seat) else transfer.receive)()
    transfer.rejoin(sides.transfer_seat(seat, attempt=2))
    (transfer.send if sides.is_policy(seat) else transfer.receive)()
    return waited, g.full_logits(module, PROMPT).numpy()


def test_after_a_missed_transfer_both_sides_can_join_again():
    sides = Sides(policy_tp=1)
    (sender_waited, sent), (_, received) = run_world(peer_late_then_retry, sides, size=2)
    assert 1.5 < sender_waited < 4.0
    assert np.array_equal(sent, received)
