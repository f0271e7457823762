"""Versions, pauses, sleep and death of the generation engine."""

import asyncio
import time

import numpy as np
import pytest
import torch

from megatron_grpo.errors import RunFailed
from megatron_grpo.types import Sampling
from tests.megatron import generation as g
from tests.megatron.world import run_world

PROMPT = [3, 5, 7, 9, 11]


def change_weights(module, scale=0.2):
    """The same change on every rank and shard: each parameter scaled by a smooth function of its position."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + scale)


def logprob_error(module, completion, temperature=1.0, part=slice(None)):
    expected = g.reference_logprobs(module, PROMPT, completion.token_ids, temperature)
    return float(np.abs(expected - completion.logprobs)[part].max())


async def all_ranks(seat, operation):
    """Await a control call here and on the peers before the next step, as the owner of all ranks does."""
    await operation
    await asyncio.to_thread(barrier, seat)


def barrier(seat):
    if seat.world.size > 1:
        torch.distributed.barrier()


async def generate(seat, engine, request_id, **options):
    sampling = Sampling(max_new_tokens=options.pop("max_new_tokens", 12))
    if seat.rank == 0:
        return await engine.generate(PROMPT, num_generations=4, sampling=sampling, request_id=request_id)
    return None


def between_requests(seat, config):
    """Weights change between two calls: log-probs and versions before and after."""
    module, engine = g.build_engine(seat, config)
    errors, versions = [], []

    def check(group):
        box = [group]
        torch.distributed.broadcast_object_list(box, src=0)
        errors.append(max(logprob_error(module, c) for c in box[0]))
        versions.append(sorted({int(v) for c in box[0] for v in c.token_versions}))

    async def scenario():
        check(await generate(seat, engine, "a"))
        await all_ranks(seat, engine.pause())
        change_weights(module)
        await all_ranks(seat, engine.set_version(5))
        await all_ranks(seat, engine.resume())
        check(await generate(seat, engine, "b"))
        await all_ranks(seat, engine.sleep())
        change_weights(module)
        await all_ranks(seat, engine.wake())
        await all_ranks(seat, engine.resume())
        await all_ranks(seat, engine.set_version(6))
        check(await generate(seat, engine, "c"))

    asyncio.run(scenario())
    engine.close()
    return errors, versions


@pytest.mark.parametrize("tp", [1, 2])
def test_new_weights_and_versions_show_in_the_next_request(tp):
    for errors, versions in run_world(between_requests, g.recipe(tp=tp), size=tp, tp=tp):
        assert max(errors) <= 1e-5, errors
        assert versions == [[0], [5], [6]]


def version_without_a_pause(seat, config):
    _, engine = g.build_engine(seat, config, sharpen=0.5)

    async def scenario():
        sampling = Sampling(max_new_tokens=80)
        task = asyncio.create_task(
            engine.generate(PROMPT, num_generations=1, sampling=sampling, request_id="one")
        )
        while not engine._engine.requests or engine._engine.get_request(0).generated_tokens[20:] == []:
            await asyncio.sleep(0.001)
        await engine.set_version(1)
        return (await task)[0]

    completion = asyncio.run(scenario())
    engine.close()
    return completion.token_versions.tolist()


def test_setting_the_version_of_a_running_engine_stamps_a_boundary():
    versions = run_world(version_without_a_pause, g.recipe())[0]
    assert versions == sorted(versions) and set(versions) == {0, 1}


def asleep(seat, config):
    """A training forward and backward fit between sleep and wake; what was submitted meanwhile is answered after."""
    from megatron.core.inference.utils import InferenceMode

    module, engine = g.build_engine(seat, config)
    facts, ids = {}, torch.tensor([PROMPT + [1]])
    length = ids.shape[1]

    def error_of(group):
        box = [group]
        torch.distributed.broadcast_object_list(box, src=0)
        return logprob_error(module, box[0][0])

    async def scenario():
        facts["first"] = error_of(await generate(seat, engine, "a"))
        await all_ranks(seat, engine.sleep())
        facts["inference mode asleep"] = InferenceMode.is_active()
        module.train()
        mask = torch.ones(1, 1, length, length).tril() < 0.5
        logits = module(ids, torch.arange(length)[None], mask)  # a rank's share of the vocabulary
        torch.log_softmax(logits, -1)[..., 0].mean().backward()
        facts["has gradient"] = all(p.grad is not None for p in module.parameters())
        change_weights(module)
        task = asyncio.create_task(generate(seat, engine, "b"))
        await asyncio.sleep(0.1)
        facts["answered asleep"] = seat.rank == 0 and task.done()
        await all_ranks(seat, engine.wake())
        await all_ranks(seat, engine.resume())
        facts["training after wake"] = module.training
        facts["second"] = error_of(await task)

    asyncio.run(scenario())
    engine.close()
    return facts


@pytest.mark.parametrize("tp", [1, 2])
def test_the_module_trains_while_the_engine_sleeps(tp):
    config = g.recipe(tp=tp, sequence_parallel=tp > 1)
    for facts in run_world(asleep, config, size=tp, tp=tp, sequence_parallel=tp > 1):
        assert facts["first"] <= 1e-5 and facts["second"] <= 1e-5
        assert not facts["inference mode asleep"] and not facts["training after wake"] and not facts["answered asleep"]
        assert facts["has gradient"]


def dying(seat, config):
    """The model raises in the middle of a step while requests run and wait."""
    module, engine = g.build_engine(seat, config)

    def explode(*args, **kwargs):
        raise ValueError("a broken kernel")

    async def scenario():
        sampling = Sampling(max_new_tokens=60)
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, num_generations=4, sampling=sampling, request_id=f"{i}"))
            for i in range(40)
        ]
        while engine.num_running < 160:
            await asyncio.sleep(0.001)
        module.decoder.register_forward_pre_hook(explode)
        begin = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        waited = time.monotonic() - begin
        with pytest.raises(RunFailed, match="a broken kernel"):
            await engine.failed()
        with pytest.raises(RunFailed, match="a broken kernel"):
            await engine.generate(PROMPT, num_generations=1, sampling=sampling, request_id="late")
        return waited, [type(r).__name__ for r in results], str(results[0])

    outcome = asyncio.run(scenario())
    begin = time.monotonic()
    engine.close()
    return *outcome, time.monotonic() - begin


def test_a_dead_engine_fails_every_request_with_its_own_traceback():
    waited, kinds, message, closing = run_world(dying, g.recipe())[0]
    assert waited < 1.5 and closing < 1.0
    assert set(kinds) == {"RunFailed"} and len(kinds) == 40
    assert "a broken kernel" in message and "in explode" in message


def watched(seat, config):
    _, engine = g.build_engine(seat, config)

    async def scenario():
        watcher = asyncio.create_task(engine.failed())
        await asyncio.sleep(0.01)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        return len(await generate(seat, engine, "after"))

    answered = asyncio.run(scenario())
    dead = engine.failure.done()
    engine.close()
    return answered, dead


def test_a_cancelled_watcher_does_not_pass_for_a_dead_engine():
    assert run_world(watched, g.recipe())[0] == (4, False)


def dead_leader(seat, config):
    """Rank 0's engine dies; rank 1 blocks on it and must notice within the deadline."""
    _, engine = g.build_engine(seat, config)
    if seat.rank == 0:
        engine._host._loop.call_soon_threadsafe(exit_thread)
    with pytest.raises(RunFailed):
        engine.failure.result(10.0)
    return "noticed"


def exit_thread():
    raise SystemExit(1)


def test_a_rank_whose_leader_is_gone_ends_within_the_deadline():
    assert run_world(dead_leader, g.recipe(tp=2, timeout_s=3.0), size=2, tp=2) == ["noticed"] * 2


def closed(seat, config):
    _, engine = g.build_engine(seat, config)

    async def scenario():
        sampling = Sampling(max_new_tokens=80)
        task = asyncio.create_task(engine.generate(PROMPT, num_generations=4, sampling=sampling, request_id="x"))
        while engine.num_running < 4:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RunFailed, match="closed"):
            await task

    asyncio.run(scenario())
    import threading

    return [thread.name for thread in threading.enumerate() if thread.name.startswith("engine")], engine.failure.done()


def test_closing_ends_threads_and_pending_requests():
    assert run_world(closed, g.recipe())[0] == ([], False)
