"""Colocated: an engine samples from the weights just trained, whatever the layouts of the two."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from megatron_grpo.types import RolloutBatch, Sampling
from tests.megatron.gradients import cut
from tests.megatron.samples import VOCAB_SIZE, build_policy, own_rows, random_rollouts, random_update, tiny_recipe
from tests.megatron.world import run_world

PROMPTS = [[3, 5, 7, 9, 11], [1, 2]]
EOS = VOCAB_SIZE  # a padding row: every answer runs to its last token
ENGINE = {"max_model_len": 32, "buffer_size_gb": 0.01, "max_tokens": 256, "block_size_tokens": 16}

LAYOUTS = {
    "PP2, shared": (cut(2, pp=2), cut(2, pp=2)),
    "PP2 -> two copies": (cut(2, pp=2), cut(2)),
    "PP2 -> TP2": (cut(2, pp=2), cut(2, tp=2)),
    "TP2 -> PP2": (cut(2, tp=2), cut(2, pp=2)),
    "uneven PP2, shared": (cut(2, pp=2), cut(2, pp=2)),
}
UNEVEN = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}


def recipe(tied, uneven):
    return tiny_recipe(
        model={"tie_word_embeddings": tied, "num_hidden_layers": 4},
        optimizer={"lr": 1e-2},
        generation={"mcore_generation_config": ENGINE},
        parallel=UNEVEN if uneven else {},
    )


class Colocated:
    """What a worker does with a policy and an engine, in the order a step does it."""

    def __init__(self, seat, engine_world, config):
        from megatron_grpo.engines.megatron import build
        from megatron_grpo.engines.megatron.inference import MegatronGeneration
        from megatron_grpo.weight_sync.second_model import SecondModel

        self.seat, self.second = seat, None
        self.policy = build_policy(seat, config)
        module = self.policy.module
        if engine_world != seat.world:
            module = build.second_module(config, engine_world, VOCAB_SIZE, seat.accelerator)
            self.second = SecondModel(self.policy.module, module, backend="gloo", timeout_s=20)
        self.enter_generation()
        self.engine = MegatronGeneration(module, config, engine_world, seat.rank, vocab_size=VOCAB_SIZE, eos_id=EOS)

    def enter_generation(self):
        self.policy.enter_generation()
        if self.second is not None:
            self.second.refresh()

    async def train(self, version, update):
        await self.engine.sleep()
        self.policy.enter_training()
        self.policy.train([own_rows(self.seat, update)])
        self.enter_generation()
        await self.engine.wake()
        await self.engine.set_version(version)
        await self.engine.resume()

    async def ask(self):
        if self.seat.rank:
            return None
        sampling = Sampling(max_new_tokens=8)
        calls = [
            self.engine.generate(prompt, num_generations=2, sampling=sampling, request_id=f"p{index}")
            for index, prompt in enumerate(PROMPTS)
        ]
        return [group[1] for group in await asyncio.gather(*calls)]

    def trainers_logprobs(self, completions):
        """Those of the same tokens by a scoring pass; every data-parallel rank scores all of them."""
        tokens = [None if completions is None else [one.token_ids.tolist() for one in completions]]
        torch.distributed.broadcast_object_list(tokens, src=0)
        rows = [prompt + generated for prompt, generated in zip(PROMPTS, tokens[0], strict=True)]
        scored = self.policy.score(as_rollouts(rows))
        return [
            logprobs[len(prompt) : len(row)]
            for prompt, row, logprobs in zip(PROMPTS, rows, scored.old_logprobs, strict=True)
        ]


def as_rollouts(rows: list[list[int]]) -> RolloutBatch:
    lengths = np.array([len(row) for row in rows])
    width = -(-int(lengths.max()) // 4) * 4
    tokens = np.array([row + [0] * (width - len(row)) for row in rows])
    is_token = np.arange(width) < lengths[:, None]
    return RolloutBatch(
        tokens=tokens,
        lengths=lengths,
        loss_mask=is_token,
        sample_mask=np.ones(len(rows), bool),
        generation_logprobs=np.zeros(tokens.shape, np.float32),
        rewards=np.zeros(len(rows)),
        group_index=np.arange(len(rows)),
    )


def followed(seat, engine_world, config):
    here = Colocated(seat, engine_world, config)
    rollouts = random_rollouts()
    update = random_update(dataclasses.replace(rollouts, tokens=rollouts.tokens % VOCAB_SIZE))

    async def scenario():
        answers = []
        for version in (1, 2):
            await here.train(version, update)
            answers.append(await here.ask())
        await here.engine.sleep()
        return answers

    answers = asyncio.run(scenario())
    here.policy.enter_training()
    expected = here.trainers_logprobs(answers[-1])
    return answers, expected if here.policy.reports else None


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_engine_samples_from_the_weights_just_trained(name, tied):
    if tied and name != "PP2 -> TP2":
        pytest.skip("one layout with a tied embedding is enough")
    train, engine = LAYOUTS[name]
    replies = run_world(followed, engine, recipe(tied, "uneven" in name), world=train)
    first, second = replies[0][0]
    assert set(first[0].token_versions) == {1} and set(second[0].token_versions) == {2}
    assert not np.allclose(first[0].logprobs[0], second[0].logprobs[0], atol=1e-4), "training changed nothing"
    reports = [expected for _, expected in replies if expected is not None]
    assert reports
    for expected in reports:
        for completion, logprobs in zip(second, expected, strict=True):
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)
