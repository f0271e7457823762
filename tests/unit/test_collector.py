"""When groups start, wait, fail and end; stream and buffer are real."""

import asyncio
import logging

import pytest

from megatron_grpo.errors import EndOfData, GenerationFailed, ReplayClosed
from megatron_grpo.types import DroppedPrompt
from tests.fakes import SteppedRollout, make_group, make_trajectory
from tests.unit.collecting import Parts, collector_test, settled


@collector_test
async def test_the_window_is_filled_nearest_target_first():
    parts = Parts(prompts=2, max_age=1)
    async with parts.running():
        assert parts.rollout.started == {0: (0, 0), 1: (0, 0), 2: (1, 0), 3: (1, 0)}


@collector_test
async def test_synchronous_training_generates_one_step_at_a_time():
    parts = Parts(prompts=2, max_age=0)
    async with parts.running():
        for ordinal in list(parts.rollout.running):
            parts.rollout.finish(ordinal)
        await parts.train(0)
        await settled()
        assert parts.rollout.started == {0: (0, 0), 1: (0, 0), 2: (1, 1), 3: (1, 1)}


@collector_test
async def test_a_new_version_starts_all_groups_of_the_next_step_at_once():
    parts = Parts(prompts=8, max_age=1)
    async with parts.running():
        for ordinal in list(parts.rollout.running):
            parts.rollout.finish(ordinal)
        await settled()
        assert parts.rollout.num_generating == 0
        await parts.train(0)
        await asyncio.sleep(0)  # the dispatcher wakes once
        await asyncio.sleep(0)  # its groups enter their rollouts
        assert parts.rollout.num_generating == 8


@collector_test
async def test_a_slow_group_does_not_delay_the_others():
    parts = Parts(prompts=2, max_age=1)
    async with parts.running():
        for ordinal in (3, 2, 1):
            parts.rollout.finish(ordinal)
        await settled()
        assert parts.replay.size == 3 and list(parts.rollout.running) == [0]


@collector_test
async def test_a_group_that_waits_for_room_counts_once():
    parts = Parts(prompts=2, max_age=1)
    for ordinal in range(100, 104):
        parts.replay.try_add(make_group(ordinal, 0, 9))  # the buffer is full of something else
    async with parts.running():
        for ordinal in range(4):
            parts.rollout.finish(ordinal)
        await settled()
        assert parts.replay.held.keys() == {100, 101, 102, 103, 0, 1}  # step 0 never waits, step 1 does
        assert (parts.collector.num_in_flight, len(parts.rollout.started)) == (4, 4)


@collector_test
async def test_the_first_failure_stops_the_run_with_the_workers_own_error():
    def raise_deep():
        raise ValueError("env boom")

    parts = Parts(max_failures=0)
    async with parts.running() as run:
        try:
            raise_deep()
        except ValueError as error:
            parts.rollout.fail(1, error)
        with pytest.raises(GenerationFailed) as raised:
            await run
    assert isinstance(raised.value.__cause__, ValueError)
    for part in ("prompt 1", "ValueError: env boom", "raise_deep", "max_generation_failures"):
        assert part in str(raised.value)
    assert parts.rollout.num_generating == 0  # no group outlives the collector


@collector_test
async def test_failures_count_in_a_row_and_a_success_resets():
    parts = Parts(prompts=4, max_failures=2)
    async with parts.running() as run:
        for ordinal, ends_well in ((0, False), (1, False), (2, True), (3, False), (4, False)):
            parts.rollout.finish(ordinal) if ends_well else parts.rollout.fail(ordinal, ValueError(str(ordinal)))
            await settled()
        assert not run.done()
        parts.rollout.fail(5, ValueError("the third in a row"))
        with pytest.raises(GenerationFailed, match="3 in a row"):
            await run


def test_a_tolerated_failure_is_logged_counted_dropped_and_refilled(caplog):
    async def scenario():
        parts = Parts(prompts=2, max_age=1, max_failures=1)
        async with parts.running():
            parts.rollout.fail(0, ValueError("env boom"))
            await settled()
            assert parts.rollout.started[4] == (0, 0)
            assert parts.stream.state().cut == 1
            first, second = await parts.collector.collected(), await parts.collector.collected()
            assert (first.counters["num_failed_groups"], second.counters["num_failed_groups"]) == (1, 0)
            assert first.dropped == (DroppedPrompt(ordinal=0, reason="generation_failed"),) and second.dropped == ()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "env boom" in caplog.text and "prompt 0" in caplog.text


@collector_test
async def test_the_deadline_of_a_group_names_its_prompt_and_since_when():
    parts = Parts(timeout_s=0.01)
    async with parts.running() as run:
        with pytest.raises(GenerationFailed, match=r"prompt 0 .*0\.01 s \(since \d\d:\d\d:\d\d\)"):
            await run


@collector_test
async def test_a_timeout_raised_by_the_rollout_is_its_own_failure():
    parts = Parts()
    async with parts.running() as run:
        parts.rollout.fail(0, TimeoutError("engine said so"))
        with pytest.raises(GenerationFailed, match="engine said so"):
            await run


@collector_test
async def test_a_request_cancelled_by_the_engine_is_a_failure_not_a_retry():
    parts = Parts()
    async with parts.running() as run:
        parts.rollout.running[0].cancel()
        with pytest.raises(GenerationFailed, match="prompt 0 was cancelled by the engine"):
            await run


@collector_test
async def test_pauses_nest_and_end_on_errors():
    parts = Parts(prompts=2, max_age=0)
    async with parts.running():
        for ordinal in (0, 1):
            parts.rollout.finish(ordinal)
        async with parts.collector.paused():
            await parts.train(0)
            with pytest.raises(KeyError):
                async with parts.collector.paused():
                    raise KeyError
            await settled()
            assert len(parts.rollout.started) == 2
        await settled()
        assert len(parts.rollout.started) == 4


@collector_test
async def test_drain_waits_for_running_groups_also_for_those_just_created():
    parts = Parts(prompts=1, max_age=0)
    task = asyncio.create_task(parts.collector.run())
    await asyncio.sleep(0)  # the dispatcher created the group's task, which did not run yet
    assert parts.rollout.num_generating == 0 and parts.collector.num_in_flight == 1
    async with parts.collector.paused():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.collector.drain(), 0.01)
        parts.rollout.finish(0)
        await parts.collector.drain()
    task.cancel()


@collector_test
async def test_evicted_prompts_are_generated_again():
    parts = Parts(prompts=2, max_age=1)
    async with parts.running():
        for ordinal in range(4):
            parts.rollout.finish(ordinal)
        await settled()
        sampled = await parts.replay.sample(0)
        await parts.collector.settle([g.ordinal for g in sampled.groups], [3], 0)
        await parts.collector.set_version(1)
        await settled()
        assert parts.rollout.started[3] == (1, 1)


@collector_test
async def test_the_end_of_the_data_ends_the_run_of_steps():
    parts = Parts(prompts=4, rows=10, epochs=1, max_age=3)
    async with parts.running() as run:
        for ordinal in range(8):
            parts.rollout.finish(ordinal)
        await parts.train(0)
        await parts.train(1)
        with pytest.raises(EndOfData):
            await parts.replay.sample(2)
        assert not run.done()


@collector_test
async def test_a_failure_near_the_end_of_the_data_is_replaced_from_the_spare_rows():
    parts = Parts(prompts=4, rows=10, epochs=1, max_failures=3, max_age=1, num_steps=2)
    async with parts.running():
        for ordinal in (0, 5):
            parts.rollout.fail(ordinal, ValueError("boom"))
        await settled()
        for ordinal in list(parts.rollout.running):
            parts.rollout.finish(ordinal)
        await parts.train(0)
        await parts.train(1)


@pytest.mark.parametrize("failing", [1, 5])
@pytest.mark.parametrize("when", ["first", "last"])
def test_without_spare_rows_a_failure_ends_the_run_a_step_earlier(failing, when):
    async def scenario():
        parts = Parts(prompts=4, rows=8, epochs=1, max_failures=3, max_age=1, num_steps=2)
        async with parts.running():
            training = asyncio.create_task(parts.train(0))  # waits while the others still run
            order = sorted(range(8), key=lambda ordinal: (ordinal == failing) == (when == "last"))
            for ordinal in order:
                if ordinal == failing:
                    parts.rollout.fail(ordinal, ValueError("boom"))
                else:
                    parts.rollout.finish(ordinal)
                await settled()
            await training
            with pytest.raises(EndOfData, match="step 1"):
                await parts.replay.sample(1)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@collector_test
async def test_with_everything_generated_the_collector_idles():
    parts = Parts(prompts=2, num_steps=1, max_age=3)
    async with parts.running() as run:
        for ordinal in (0, 1):
            parts.rollout.finish(ordinal)
        await parts.train(0)
        await settled()
        assert len(parts.rollout.started) == 2 and not run.done()


@collector_test
async def test_a_closed_buffer_ends_the_collector_with_the_cause():
    parts = Parts()
    async with parts.running() as run:
        await parts.replay.close("the trainer died")
        parts.rollout.finish(0)
        with pytest.raises(ReplayClosed, match="the trainer died"):
            await run


@collector_test
async def test_cancelling_the_collector_gives_the_prompts_back():
    parts = Parts(prompts=2, max_age=1)
    async with parts.running():
        pass
    assert parts.collector.num_in_flight == 0
    assert [parts.stream.next_prompt().ordinal for _ in range(5)] == [0, 1, 2, 3, 4]


@collector_test
async def test_a_group_of_another_version_than_it_may_have_never_enters_the_buffer():
    class OldWeights(SteppedRollout):
        async def run_group(self, prompt, *, target_step, generation_version):
            return make_group(prompt.ordinal, generation_version - 1, target_step)

    parts = Parts(rollout=OldWeights())
    async with parts.running() as run:
        with pytest.raises(AssertionError):
            await run
    assert parts.replay.size == 0


@collector_test
async def test_counters_sum_what_was_generated_since_the_last_call():
    parts = Parts(prompts=1, max_age=0)
    async with parts.running():
        parts.rollout.finish(
            0,
            (
                make_trajectory([0, 0]),
                make_trajectory([0, 1, 1], finish="length"),
                make_trajectory([], masked_because="reward"),
            ),
        )
        await settled()
        collected = await parts.collector.collected()
    assert collected.counters == {
        "num_groups": 1,
        "num_failed_groups": 0,
        "num_refused_groups": 0,
        "num_trajectories": 3,
        "num_masked_trajectories": 1,
        "num_truncated_trajectories": 1,
        "num_mixed_version_trajectories": 1,
        "num_generated_tokens": 5,
        "num_groups_in_flight": 1,
    }
