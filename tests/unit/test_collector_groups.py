"""Which finished groups the collector refuses, and how requests, log-probs and environments fail under it."""

import asyncio
import dataclasses

import numpy as np
import pytest

from megatron_grpo.errors import EndOfData, GenerationFailed, SamplingExhausted
from megatron_grpo.replay.admission import DynamicSampling
from megatron_grpo.rollout.group import GroupRollout
from megatron_grpo.rollout.reward_values import Reward
from megatron_grpo.types import DroppedPrompt, Sampling
from tests.fakes import (
    CharacterTokenizer,
    EchoGenerator,
    SteppedRollout,
    make_completion,
    make_group,
    make_trajectory,
)
from tests.unit.collecting import Parts, collector_test, settled


def rewarded(*rewards):
    return tuple(dataclasses.replace(make_trajectory([0]), reward=reward) for reward in rewards)


def sampling(prompts, limit):
    return DynamicSampling(num_prompts_per_step=prompts, max_gen_batches=limit)


@collector_test
async def test_a_group_without_variance_is_not_admitted_and_its_place_is_generated_again():
    parts = Parts(prompts=2, max_age=0, admission=sampling(2, 3))
    async with parts.running():
        parts.rollout.finish(0, rewarded(1.0, 1.0))
        await settled()
        assert parts.rollout.started[2] == (0, 0) and parts.replay.size == 0
        parts.rollout.finish(1, rewarded(0.0, 1.0))
        parts.rollout.finish(2, rewarded(0.0, 1.0))
        sampled = await parts.replay.sample(0)
        assert [group.ordinal for group in sampled.groups] == [1, 2]
        collected = await parts.collector.collected()
        assert collected.dropped == (DroppedPrompt(ordinal=0, reason="zero_variance"),)
        assert (collected.counters["num_groups"], collected.counters["num_refused_groups"]) == (3, 1)
        await parts.collector.settle([1, 2], [], 0)
        state = parts.stream.state()
        assert (state.cut, state.num_owed) == (3, 0)


@collector_test
async def test_a_fully_masked_group_fills_its_place_but_its_prompt_is_listed_as_dropped():
    parts = Parts(prompts=2, max_age=0)
    async with parts.running():
        parts.rollout.finish(0, (make_trajectory([0], masked_because="overlong"),) * 2)
        parts.rollout.finish(1, (make_trajectory([0]), make_trajectory([0], masked_because="overlong")))
        await parts.train(0)
        assert (await parts.collector.collected()).dropped == (DroppedPrompt(ordinal=0, reason="fully_masked"),)
        state = parts.stream.state()
        assert (state.cut, state.frontier, state.num_owed) == (2, 2, 0)


@collector_test
async def test_a_refused_group_is_no_failure():
    parts = Parts(prompts=2, max_age=0, max_failures=1, admission=sampling(2, 9))
    async with parts.running() as run:
        for ordinal, ends_well in ((0, False), (1, True), (2, False), (3, True)):
            if ends_well:
                parts.rollout.finish(ordinal, rewarded(1.0, 1.0))
            else:
                parts.rollout.fail(ordinal, ValueError("boom"))
            await settled()
        assert not run.done()
        dropped = (await parts.collector.collected()).dropped
        assert [prompt.reason for prompt in dropped] == ["generation_failed", "zero_variance"] * 2


@collector_test
async def test_constant_rewards_end_the_run_after_the_batches_that_the_limit_allows():
    class Constant(SteppedRollout):
        async def run_group(self, prompt, *, target_step, generation_version):
            self.started[prompt.ordinal] = (target_step, generation_version)
            return make_group(prompt.ordinal, generation_version, target_step, rewarded(1.0, 1.0))

    parts = Parts(prompts=4, max_age=0, rollout=Constant(), admission=sampling(4, 3))
    async with parts.running() as run:
        with pytest.raises(SamplingExhausted, match="grpo.dynamic_sampling_max_gen_batches = 3"):
            await run
    assert len(parts.rollout.started) <= 3 * 4 and parts.replay.size == 0


@collector_test
async def test_filtering_spends_rows_and_may_end_the_run_earlier():
    parts = Parts(prompts=2, rows=5, epochs=1, max_age=1, num_steps=2, admission=sampling(2, 9))
    async with parts.running() as run:
        for ordinal, rewards in ((0, (1.0, 1.0)), (1, (0.0, 1.0)), (2, (0.0, 1.0)), (3, (0.0, 1.0))):
            parts.rollout.finish(ordinal, rewarded(*rewards))
            await settled()
        await parts.train(0)  # the groups of step 1 closed ranks; the spare row replaces failures only
        with pytest.raises(EndOfData, match="step 1"):
            await parts.replay.sample(1)
        assert not run.done() and len(parts.rollout.started) == 4


class AllRight:
    """A `Scoring` that gives every response the reward 1."""

    async def score(self, env_name, problem, responses):
        return tuple(Reward(value=1.0) for _ in responses)


def engine_parts(generator, rewards=None, **options):
    """A collector over a real `GroupRollout`."""
    rollout = GroupRollout(generator, rewards or AllRight(), CharacterTokenizer(), Sampling(max_new_tokens=4), 2)
    return Parts(rollout=rollout, **options)


@collector_test
async def test_a_request_that_hangs_is_named_by_its_prompt():
    generator = EchoGenerator(lambda prompt_ids: [])
    generator.release.clear()
    async with engine_parts(generator, timeout_s=0.02).running() as run:
        with pytest.raises(GenerationFailed, match=r"the group of prompt 0 \(step 0\) was not finished after 0\.02 s"):
            await run
    assert generator.num_running == 0


@collector_test
async def test_log_probs_that_are_not_finite_fail_their_group_by_name():
    bad = dataclasses.replace(make_completion([5, 1]), logprobs=np.array([-1.0, np.nan], np.float32))
    good = [make_completion([5, 1]), make_completion([6, 1])]
    answers = iter([[good[0], bad], *[good] * 9])
    parts = engine_parts(EchoGenerator(lambda prompt_ids: next(answers)), max_failures=1, max_age=0)
    async with parts.running():
        await parts.train(0)
        [dropped] = (await parts.collector.collected()).dropped
    assert dropped == DroppedPrompt(ordinal=0, reason="generation_failed")

    parts = engine_parts(EchoGenerator(lambda prompt_ids: [good[0], bad]))
    async with parts.running() as run:
        with pytest.raises(GenerationFailed, match=r"completion 1 of prompt 0: the log-prob of token 1 .* is nan"):
            await run


@collector_test
async def test_an_environment_that_blocks_on_one_prompt_delays_no_other_group():
    class BlocksOnFirst(AllRight):
        calls = 0

        async def score(self, env_name, problem, responses):
            self.calls += 1
            if self.calls == 1:
                await asyncio.Event().wait()
            return await super().score(env_name, problem, responses)

    generator = EchoGenerator(lambda prompt_ids: [make_completion([5, 1])] * 2)
    parts = engine_parts(generator, BlocksOnFirst(), max_failures=1, max_age=0, timeout_s=0.2)
    async with parts.running():
        await settled()
        assert parts.replay.size == 1 and parts.rollout.num_generating == 0
        await parts.train(0)  # its deadline passed, another prompt took its place
        collected = await parts.collector.collected()
    assert [prompt.ordinal for prompt in collected.dropped] == [0]
