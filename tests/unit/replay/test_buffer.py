import asyncio

import pytest

from megatron_grpo.errors import DeadlineExceeded, EndOfData, ReplayClosed
from megatron_grpo.replay.buffer import ReplayBuffer
from tests.fakes import make_group


def buffer(*, capacity=8, prompts=2, max_age=1, timeout_s=30.0, num_steps=1000):
    return ReplayBuffer(
        capacity=capacity,
        num_prompts_per_step=prompts,
        max_age=max_age,
        sample_timeout_s=timeout_s,
        num_steps=num_steps,
    )


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def ordinals(sampled):
    return [group.ordinal for group in sampled.groups]


def test_sample_waits_for_exactly_p_groups_of_its_step_in_insertion_order():
    async def scenario():
        replay = buffer()
        waiting = asyncio.create_task(replay.sample(0))
        for group in (make_group(5, 0, 1), make_group(3, 0, 0), make_group(4, 0, 1)):
            await replay.add(group)
        await turns()
        assert not waiting.done() and replay.last_sampled == -1
        await replay.add(make_group(1, 0, 0))
        sampled = await waiting
        assert ordinals(sampled) == [3, 1]
        assert (replay.last_sampled, replay.size, sampled.buffer_size) == (0, 2, 2)
        assert ordinals(await replay.sample(1)) == [5, 4]

    asyncio.run(scenario())


def test_leftovers_and_stale_groups_are_evicted_and_reported_with_the_batch():
    async def scenario():
        replay = buffer(max_age=1)
        for ordinal in range(3):
            await replay.add(make_group(ordinal, 0, 0))
        assert ordinals(await replay.sample(0)) == [0, 1]
        await replay.add(make_group(7, 3, 5))  # too old for 5
        await replay.add(make_group(8, 4, 5))
        await replay.add(make_group(9, 5, 5))
        sampled = await replay.sample(5)
        assert (ordinals(sampled), sampled.evicted) == ([8, 9], (2, 7))

    asyncio.run(scenario())


def test_a_group_from_the_future_of_its_step_is_never_sampled():
    replay = buffer()
    replay.try_add(make_group(0, 3, 2))
    assert replay.try_sample(2, 1, 1) is None
    assert replay.size == 0


def test_a_full_buffer_makes_producers_wait_and_a_sample_lets_them_in():
    async def scenario():
        replay = buffer(capacity=4)
        for ordinal in range(4):
            await replay.add(make_group(ordinal, 0, ordinal // 2))
        producers = [asyncio.create_task(replay.add(make_group(n, 0, 1 + n % 2))) for n in (4, 5, 6, 7)]
        await turns()
        assert not any(producer.done() for producer in producers) and replay.size == 4
        await replay.sample(0)
        await turns()
        # Two places were free: the nearest target's groups come in first.
        assert [producer.done() for producer in producers] == [True, False, True, False]
        replay.try_sample(1, 4, 1)
        await asyncio.gather(*producers)
        assert replay.targets == (2,)

    asyncio.run(scenario())


def test_the_next_step_to_be_sampled_never_waits_for_room():
    async def scenario():
        replay = buffer(capacity=2)
        for ordinal in range(2):
            await replay.add(make_group(ordinal, 0, 1))
        assert replay.try_add(make_group(9, 0, 2)) == "full"
        for ordinal in (2, 3):
            await asyncio.wait_for(replay.add(make_group(ordinal, 0, 0)), 1)
        assert ordinals(await replay.sample(0)) == [2, 3]

    asyncio.run(scenario())


def test_a_waiting_producer_is_let_in_when_its_target_becomes_the_next_one():
    async def scenario():
        replay = buffer(capacity=1)
        await replay.add(make_group(0, 0, 2))
        producers = [asyncio.create_task(replay.add(make_group(n, 0, 1))) for n in (1, 2)]
        await turns()
        assert not any(producer.done() for producer in producers)
        await replay.add(make_group(3, 0, 0))
        await replay.add(make_group(4, 0, 0))
        await replay.sample(0)
        assert ordinals(await replay.sample(1)) == [1, 2]
        await asyncio.gather(*producers)

    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["cancelled", "placed, cancelled", "cancelled, room"])
def test_a_cancelled_add_leaves_no_group_behind(order):
    async def scenario():
        replay = buffer(capacity=2)
        for ordinal in range(2):
            await replay.add(make_group(ordinal, 0, 0))
        producer = asyncio.create_task(replay.add(make_group(2, 0, 1)))
        await turns()
        if order == "placed, cancelled":
            replay.try_sample(0, 2, 1)
            assert replay.size == 1
        producer.cancel()
        if order == "cancelled, room":
            replay.try_sample(0, 2, 1)
        with pytest.raises(asyncio.CancelledError):
            await producer
        replay.try_sample(0, 2, 1)
        assert replay.size == 0

    asyncio.run(scenario())


def test_eight_producers_lose_and_double_nothing():
    async def producer(replay, number, next_target):
        for count in range(50):
            ordinal = number * 50 + count
            target = next_target() // 5
            await replay.add(make_group(ordinal, max(0, target - 1), target))
            await asyncio.sleep(0)

    async def scenario():
        replay = buffer(capacity=10, prompts=5, max_age=1)
        tickets = iter(range(400))
        producers = [asyncio.create_task(producer(replay, n, lambda: next(tickets))) for n in range(8)]
        consumed = []
        for step in range(80):
            sampled = await replay.sample(step)
            assert len(sampled.groups) == 5 and {g.target_step for g in sampled.groups} == {step}
            assert sampled.evicted == () and replay.size <= 10 + 5
            consumed += ordinals(sampled)
        await asyncio.gather(*producers)
        assert sorted(consumed) == list(range(400)) and replay.size == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_close_ends_every_wait_with_its_cause():
    async def scenario():
        replay = buffer(capacity=1)
        await replay.add(make_group(0, 0, 1))
        producer = asyncio.create_task(replay.add(make_group(1, 0, 2)))
        consumer = asyncio.create_task(replay.sample(0))
        await turns()
        await replay.close("the collector died: boom")
        await replay.close("a later consequence")
        for wait in (producer, consumer, replay.sample(0), replay.add(make_group(2, 0, 0))):
            with pytest.raises(ReplayClosed, match="the collector died: boom"):
                await wait

    asyncio.run(scenario())


def test_end_of_data_ends_the_sample_of_the_missing_step_and_later_ones():
    async def scenario():
        replay = buffer()
        consumer = asyncio.create_task(replay.sample(3))
        await turns()
        await replay.end_of_data(3)
        with pytest.raises(EndOfData, match="step 3"):
            await consumer
        with pytest.raises(EndOfData):
            await replay.sample(4)

    asyncio.run(scenario())


def test_end_of_data_leaves_complete_and_earlier_steps():
    async def scenario():
        replay = buffer()
        await replay.end_of_data(1)
        consumer = asyncio.create_task(replay.sample(0))
        for ordinal in range(2):
            await replay.add(make_group(ordinal, 0, 0))
        assert ordinals(await consumer) == [0, 1]
        await replay.end_of_data(0)
        await replay.end_of_data(5)
        for ordinal in range(2):
            await replay.add(make_group(ordinal, 0, 1))
        assert len((await replay.sample(1)).groups) == 2

    asyncio.run(scenario())


def test_after_the_end_of_data_groups_close_ranks():
    async def scenario():
        replay = buffer(max_age=2)
        for ordinal, target in ((0, 0), (2, 1), (3, 1), (4, 2)):
            await replay.add(make_group(ordinal, 0, target))
        consumer = asyncio.create_task(replay.sample(0))
        await turns()
        await replay.end_of_data(2)
        assert ordinals(await consumer) == [0, 2]
        await replay.add(make_group(5, 0, 2))
        sampled = await replay.sample(1)
        assert ordinals(sampled) == [3, 4] and sampled.groups[1].target_step == 1
        with pytest.raises(EndOfData):
            await replay.sample(2)

    asyncio.run(scenario())


def test_a_group_never_moves_to_a_step_that_it_cannot_serve():
    async def scenario():
        replay = buffer(max_age=1, prompts=1)
        await replay.end_of_data(9)
        await replay.add(make_group(0, 3, 4))
        assert replay.targets == (3,)
        await replay.add(make_group(1, 3, 4))
        assert replay.targets == (3, 4)

    asyncio.run(scenario())


def test_a_step_beyond_the_run_cannot_be_sampled():
    with pytest.raises(EndOfData, match="4 steps"):
        asyncio.run(buffer(num_steps=4).sample(4))


def test_the_deadline_says_who_waited_for_what_and_what_is_there():
    async def scenario():
        replay = buffer(timeout_s=0.01)
        await replay.add(make_group(0, 7, 7))
        await replay.add(make_group(1, 7, 8))
        with pytest.raises(DeadlineExceeded) as raised:
            await replay.sample(7)
        text = str(raised.value)
        for part in ("trainer", "step 7", "since", "1 of step 7, 1 of step 8", "timeouts.sample"):
            assert part in text
        assert replay.size == 2

    asyncio.run(scenario())


def test_a_sample_waits_again_when_a_group_that_completed_its_step_was_stale():
    async def scenario():
        replay = buffer(max_age=1)
        consumer = asyncio.create_task(replay.sample(5))
        await turns()
        for ordinal, version in ((0, 5), (1, 3)):
            await replay.add(make_group(ordinal, version, 5))
        await turns()
        assert not consumer.done() and replay.size == 1
        await replay.add(make_group(2, 4, 5))
        sampled = await consumer
        assert (ordinals(sampled), sampled.evicted) == ([0, 2], (1,))

    asyncio.run(scenario())


def test_restore_takes_over_what_is_usable_and_where_the_run_stands():
    replay = buffer(capacity=8, max_age=1)
    restored = replay.restore([make_group(0, 3, 4), make_group(1, 4, 5), make_group(2, 5, 6)], resume_step=5)
    assert restored.dropped == (0,)
    assert replay.held == {1: 5, 2: 6}
    assert replay.last_sampled == 4
    assert [replay.get_trajectories_needed(step, 2, 1) for step in (5, 6, 7)] == [1, 1, 2]
