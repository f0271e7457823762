"""One prompt becomes one group: what trains, what is masked, which version counts, and how it drains."""

import asyncio
import dataclasses
import logging

import numpy as np
import pytest

from megatron_grpo.algorithms.shaping import OverlongPenalty, RewardScaling
from megatron_grpo.errors import RewardFailed
from megatron_grpo.rollout.completions import BadCompletion
from megatron_grpo.rollout.group import GroupRollout
from megatron_grpo.rollout.reward_values import Reward
from megatron_grpo.types import Prompt, Sampling
from tests.fakes import CharacterTokenizer, EchoGenerator, make_completion, make_prompt

EOS = CharacterTokenizer.eos_id
SAMPLING = Sampling(max_new_tokens=8, stop_token_ids=(ord(";"),))


class LengthRewards:
    """Rewards are the length of the response, or what the test sets."""

    def __init__(self):
        self.responses = []
        self.fixed = None
        self.error = None

    async def score(self, env_name, problem, responses):
        self.responses += responses
        if self.error is not None:
            raise self.error
        return self.fixed or tuple(Reward(value=float(len(response))) for response in responses)


def rollout(completions, *, num=None, rewards=None, **options):
    generator = EchoGenerator(lambda prompt_ids: completions)
    rewards = rewards or LengthRewards()
    return GroupRollout(generator, rewards, CharacterTokenizer(), SAMPLING, num or len(completions), **options)


def run(group_rollout, prompt=None, version=5, target=6):
    prompt = prompt or make_prompt(3)
    return asyncio.run(group_rollout.run_group(prompt, target_step=target, generation_version=version))


def text(word, **options):
    return make_completion([*map(ord, word), EOS], **options)


def test_a_group_holds_prompt_and_completion_as_they_came():
    group = run(rollout([text("ab", version=5)]))
    (trajectory,) = group.trajectories
    assert (group.ordinal, group.target_step, group.generation_version) == (3, 6, 5)
    assert trajectory.token_ids.tolist() == [1, 2, ord("a"), ord("b"), EOS]
    assert trajectory.loss_mask.tolist() == [False, False, True, True, True]
    assert trajectory.generation_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert trajectory.token_versions.tolist() == [-1, -1, 5, 5, 5]
    assert (trajectory.reward, trajectory.masked_because) == (2.0, None)
    arrays = trajectory.token_ids, trajectory.loss_mask, trajectory.generation_logprobs, trajectory.token_versions
    assert [array.dtype for array in arrays] == [np.int32, bool, np.float32, np.int32]


def test_the_verifier_sees_the_response_without_the_token_that_stopped_it():
    rewards = LengthRewards()
    cut_off = make_completion([*map(ord, "cd")], finish="length")
    other_stop = make_completion([*map(ord, "ef;")])
    run(rollout([text("ab"), cut_off, other_stop], rewards=rewards))
    assert rewards.responses == ["ab", "cd", "ef"]


def test_a_stop_string_is_cut_off_the_response():
    rewards = LengthRewards()
    generator = EchoGenerator(lambda prompt_ids: [make_completion([*map(ord, "12##")])])
    sampling = Sampling(max_new_tokens=8, stop_strings=("##",))
    run(GroupRollout(generator, rewards, CharacterTokenizer(), sampling, 1))
    assert rewards.responses == ["12"]


def test_an_empty_completion_trains_nothing_and_a_lone_eos_one_token():
    rewards = LengthRewards()
    group = run(rollout([make_completion([]), make_completion([EOS], version=6)], rewards=rewards))
    assert [trajectory.num_generated for trajectory in group.trajectories] == [0, 1]
    assert rewards.responses == ["", ""]
    assert group.generation_version == 5


def test_a_group_of_only_empty_completions_is_still_a_group():
    group = run(rollout([make_completion([])] * 4))
    assert len(group.trajectories) == 4 and group.generation_version == 5


@pytest.mark.parametrize("stamped, counted", [([5, 6], 5), ([4, 6], 4), ([6, 7], 5)])
def test_the_oldest_weights_used_count(stamped, counted):
    group = run(rollout([text("a", version=version) for version in stamped]))
    assert group.generation_version == counted


@pytest.mark.parametrize("filtering, reason", [(True, "overlong"), (False, None)])
def test_the_overlong_filter_masks_what_was_cut_off(filtering, reason):
    group = run(rollout([text("a", finish="length"), text("b")], overlong_filtering=filtering))
    assert [trajectory.masked_because for trajectory in group.trajectories] == [reason, None]


def test_an_unusable_reward_masks_its_sample_and_names_prompt_and_value(caplog):
    rewards = LengthRewards()
    rewards.fixed = (Reward(value=0.0, unusable="nan"), Reward(value=1.0))
    group_rollout = rollout([text("a"), text("b")], rewards=rewards)
    with caplog.at_level(logging.WARNING):
        group = run(group_rollout)
    assert [trajectory.masked_because for trajectory in group.trajectories] == ["bad_reward", None]
    assert "prompt 3" in caplog.text and "question 3" in caplog.text and "nan" in caplog.text
    assert group_rollout.take_counts().num_bad_rewards == 1


def test_rewards_are_rewritten_in_order_and_unusable_ones_left_alone():
    rewards = LengthRewards()
    rewards.fixed = (Reward(value=1.0), Reward(value=1.0), Reward(value=0.0, unusable="nan"))
    double = RewardScaling(source_min=0.0, source_max=1.0, target_min=0.0, target_max=2.0)
    penalty = OverlongPenalty(max_response_length=4, buffer_length=2, penalty=1.0)
    words = [text("a"), text("abc", finish="length"), text("b")]  # with EOS 2, 4 and 2 tokens
    group = run(rollout(words, rewards=rewards, transforms=(double, penalty)))
    assert [trajectory.reward for trajectory in group.trajectories] == [2.0, 1.0, 0.0]


def test_tokens_of_an_engine_that_keeps_no_versions_are_as_old_as_their_group():
    group = run(rollout([text("ab", version=9)], engine_stamps_versions=False), version=5)
    assert group.trajectories[0].token_versions.tolist() == [-1, -1, 5, 5, 5] and group.generation_version == 5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_log_prob_that_is_not_finite_is_refused_by_name(value):
    bad = dataclasses.replace(text("abc"), logprobs=np.array([-1, value, -1, -1], np.float32))
    with pytest.raises(BadCompletion, match=f"completion 1 of prompt 3: the log-prob of token 1 of 4.*{value}"):
        run(rollout([text("a"), bad]))


def test_arrays_of_different_lengths_are_refused():
    bad = dataclasses.replace(text("abc"), token_versions=np.zeros(2, np.int32))
    with pytest.raises(BadCompletion, match="4 tokens, 4 log-probs and 2 versions"):
        run(rollout([bad]))


def test_a_missing_completion_is_refused():
    with pytest.raises(BadCompletion, match="1 of 4 completions"):
        run(rollout([text("a")], num=4))


def test_a_failed_verifier_fails_the_group_and_counts_nothing():
    rewards = LengthRewards()
    rewards.error = RewardFailed("env boom")
    group_rollout = rollout([text("a")], rewards=rewards)
    with pytest.raises(RewardFailed, match="env boom"):
        run(group_rollout)
    assert group_rollout.num_generating == 0
    assert group_rollout.take_counts().max_generated_tokens == 0


def test_counts_add_up_and_are_taken_once():
    group_rollout = rollout([text("aa"), text("bb", finish="length"), make_completion([])], overlong_filtering=True)
    run(group_rollout)
    run(group_rollout)
    counts = group_rollout.take_counts()
    assert (counts.num_overlong, counts.num_empty_completions, counts.max_generated_tokens) == (2, 2, 3)
    assert counts.num_zero_variance_groups == 0
    assert group_rollout.take_counts().num_overlong == 0


def test_equal_rewards_are_counted_as_zero_variance():
    group_rollout = rollout([text("aa"), text("bb")])
    run(group_rollout)
    assert group_rollout.take_counts().num_zero_variance_groups == 1


def test_a_request_id_depends_on_nothing_but_its_prompt():
    """Ids seed the sampling: a resumed run gives a prompt the id of the uninterrupted one."""
    after_others, alone = (EchoGenerator(lambda prompt_ids: [text("a")]) for _ in range(2))
    for generator, ordinals in ((after_others, (1, 2, 3)), (alone, (3,))):
        group_rollout = GroupRollout(generator, LengthRewards(), CharacterTokenizer(), SAMPLING, 1)
        for ordinal in ordinals:
            run(group_rollout, make_prompt(ordinal))
    assert after_others.request_ids[-1] == alone.request_ids[-1]


def test_a_prompt_that_comes_again_has_another_request_id():
    generator = EchoGenerator(lambda prompt_ids: [text("a")])
    group_rollout = GroupRollout(generator, LengthRewards(), CharacterTokenizer(), SAMPLING, 1)
    run(group_rollout)
    run(group_rollout)
    assert len(set(generator.request_ids)) == 2 and all("3" in name for name in generator.request_ids)


def test_a_prompt_of_no_tokens_is_carried():
    empty = Prompt(ordinal=0, token_ids=(), env_name="fake", problem=make_prompt(0).problem)
    assert run(rollout([text("a")]), empty).trajectories[0].token_ids.tolist() == [ord("a"), EOS]


def test_draining_waits_for_generation_but_not_for_scoring():
    async def scenario():
        generator = EchoGenerator(lambda prompt_ids: [text("a")])
        generator.release.clear()
        scoring = asyncio.Event()

        class SlowRewards(LengthRewards):
            async def score(self, env_name, problem, responses):
                await scoring.wait()
                return await super().score(env_name, problem, responses)

        group_rollout = GroupRollout(generator, SlowRewards(), CharacterTokenizer(), SAMPLING, 1)
        await group_rollout.wait_drained()
        groups = [
            asyncio.ensure_future(group_rollout.run_group(make_prompt(n), target_step=0, generation_version=0))
            for n in range(3)
        ]
        await asyncio.sleep(0)
        drained = asyncio.ensure_future(group_rollout.wait_drained())
        groups[0].cancel()
        await asyncio.gather(groups[0], return_exceptions=True)
        assert group_rollout.num_generating == 2 and not drained.done()
        generator.release.set()
        await asyncio.wait_for(drained, 5)
        assert group_rollout.num_generating == 0 and not groups[1].done()
        scoring.set()
        return await asyncio.gather(*groups[1:])

    assert [group.ordinal for group in asyncio.run(scenario())] == [1, 2]
