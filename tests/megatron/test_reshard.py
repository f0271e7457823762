"""Colocated, engine cut differently from the trainer: a second model follows the first through training steps."""

import asyncio
import dataclasses

import numpy as np
import pytest

from megatron_grpo.layout import Gpu, Sizes, build_world
from megatron_grpo.types import Sampling
from tests.megatron import generation as g
from tests.megatron.samples import own_rows, random_rollouts, random_update, tiny_recipe
from tests.megatron.world import run_world

PROMPT = [3, 5, 7, 9, 11]
EOS = g.VOCAB  # a padding row: every answer runs to its last token
GPUS = [Gpu(node=0, gpu=gpu) for gpu in range(2)]


def recipe(policy_tp, engine_tp):
    engine = {"tensor_model_parallel_size": engine_tp, "max_model_len": 32, "buffer_size_gb": 0.01, "max_tokens": 256}
    return tiny_recipe(
        generation={"mcore_generation_config": engine | {"block_size_tokens": 16}},
        megatron_cfg={
            "tensor_model_parallel_size": policy_tp,
            "optimizer": {"lr": 1e-2},
            "scheduler": {"lr_warmup_iters": 0},
        },
    )


def update():
    rollouts = random_rollouts()
    return random_update(dataclasses.replace(rollouts, tokens=rollouts.tokens % g.VOCAB))


class Colocated:
    """What a worker does with a policy and an engine of another cut, in the order a step does it."""

    def __init__(self, seat, engine_tp):
        from megatron_grpo.engines.megatron import build
        from megatron_grpo.engines.megatron.inference import MegatronGeneration
        from megatron_grpo.weight_sync.second_model import SecondModel

        config = recipe(seat.world.tp, engine_tp)
        world = build_world(GPUS, Sizes(tp=engine_tp))
        self.seat = seat
        self.policy = build.policy(config, seat.world, seat.rank, seat.rendezvous, g.VOCAB, seat.accelerator)
        self.module = build.second_module(config, world, g.VOCAB, seat.accelerator)
        self.second = SecondModel(self.policy.module, self.module, backend="gloo", timeout_s=20)
        self.policy.enter_generation()
        self.second.refresh()
        self.engine = MegatronGeneration(
            self.module, config, world, seat.rank, vocab_size=g.VOCAB, eos_id=EOS
        )

    async def ask(self, name):
        """One of two completions; only the primary rank asks."""
        if self.seat.rank:
            return None
        sampling = Sampling(max_new_tokens=8)
        return (await self.engine.generate(PROMPT, num_generations=2, sampling=sampling, request_id=name))[1]

    async def train(self, version):
        await self.engine.sleep()
        self.policy.enter_training()
        self.policy.train([own_rows(self.seat, update())])
        self.policy.enter_generation()
        self.second.refresh()
        await self.engine.wake()
        await self.engine.set_version(version)
        await self.engine.resume()

    def errors(self, completion):
        """Largest difference of the completion's log-probs from either model's full forward (collective)."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group
        from torch.distributed import broadcast_object_list

        tokens = [completion.token_ids.tolist() if completion else None]
        broadcast_object_list(tokens, src=0)
        assert get_tensor_model_parallel_group().size() == self.seat.world.tp, "training lost its groups"
        models = (self.policy.module, self.module)
        expected = [g.reference_logprobs(model, PROMPT, tokens[0]) for model in models]
        return [float(np.abs(completion.logprobs - one).max()) for one in expected] if completion else []


def followed(seat, engine_tp):
    here = Colocated(seat, engine_tp)
    storages = [parameter.data_ptr() for parameter in here.module.parameters()]
    plan = here.second._resharding._plan

    async def scenario():
        answers = []
        for version in (1, 2):
            await here.train(version)
            answers.append(await here.ask(f"v{version}"))
        await here.engine.sleep()
        return answers

    answers = asyncio.run(scenario())
    assert here.second._resharding._plan is plan, "the plan was made again"
    assert storages == [parameter.data_ptr() for parameter in here.module.parameters()], "the engine's tensors moved"
    errors = here.errors(answers[-1])
    return answers, errors, here.module.vocab_size == here.policy.module.vocab_size


@pytest.mark.parametrize(("policy_tp", "engine_tp"), [(2, 1), (1, 2)])
def test_the_engine_samples_from_the_weights_just_trained(policy_tp, engine_tp):
    (answers, errors, same_vocabulary), (_, _, other) = run_world(followed, engine_tp, size=2, tp=policy_tp)
    assert same_vocabulary and other
    assert max(errors) <= 1e-5, errors
    first, second = answers
    assert set(first.token_versions) == {1} and set(second.token_versions) == {2}
    assert not np.allclose(first.logprobs[0], second.logprobs[0], atol=1e-4), "training changed nothing"
