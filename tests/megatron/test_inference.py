"""The generation engine against forward passes without a cache: tokens, log-probs, stops, many at once."""

import asyncio

import numpy as np
import pytest
import torch

from megatron_grpo.errors import ConfigError
from megatron_grpo.types import Sampling
from tests.megatron import generation as g
from tests.megatron.world import run_world

PROMPTS = ([3, 5, 7, 9, 11], [1, 2], [(7 * i) % 41 for i in range(37)])


def complete(engine, prompts, sampling, num_generations=1):
    async def everything():
        return await asyncio.gather(
            *(
                engine.generate(prompt, num_generations=num_generations, sampling=sampling, request_id=f"p{index}")
                for index, prompt in enumerate(prompts)
            )
        )

    return asyncio.run(everything())


def share(value):
    """The primary's value on every rank."""
    box = [value]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def sample_on_primary(seat, engine, *args, **options):
    return share(complete(engine, *args, **options) if seat.rank == 0 else None)


def differences(seat, config):
    """Greedy equality, then the largest log-prob error at several temperatures, seen by every rank."""
    module, engine = g.build_engine(seat, config)
    greedy = sample_on_primary(seat, engine, PROMPTS, Sampling(max_new_tokens=10, temperature=0.0))
    tokens = [(c[0].token_ids.tolist(), g.greedy_loop(module, p, 10)) for p, c in zip(PROMPTS, greedy, strict=True)]
    errors = {}
    for temperature in (0.0, 1.0, 0.7):
        sampling = Sampling(max_new_tokens=10, temperature=temperature)
        groups = sample_on_primary(seat, engine, PROMPTS, sampling, num_generations=2)
        errors[temperature] = max(
            float(np.abs(c.logprobs - g.reference_logprobs(module, p, c.token_ids, temperature or 1.0)).max())
            for p, group in zip(PROMPTS, groups, strict=True)
            for c in group
        )
    engine.close()
    return tokens, errors


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_and_logprobs_equal_forward_passes_without_a_cache(tp):
    for tokens, errors in run_world(differences, g.recipe(tp=tp), size=tp, tp=tp):
        for got, expected in tokens:
            assert got == expected
        assert max(errors.values()) <= 1e-5, errors


def test_sequence_parallel_generation_equals_the_reference():
    config = g.recipe(tp=2, sequence_parallel=True)
    for tokens, errors in run_world(differences, config, size=2, tp=2, sequence_parallel=True):
        assert all(got == expected for got, expected in tokens)
        assert max(errors.values()) <= 1e-5, errors


def filtered(seat, config):
    from megatron_grpo.engines.megatron.sampling import sampling_logprobs

    module, engine = g.build_engine(seat, config)
    worst = 0.0
    for top_k, top_p in ((3, 1.0), (None, 0.5), (5, 0.8)):
        sampling = Sampling(max_new_tokens=8, temperature=0.7, top_k=top_k, top_p=top_p)
        for prompt, group in zip(PROMPTS, complete(engine, PROMPTS, sampling, num_generations=3), strict=True):
            for c in group:
                rows = g.full_logits(module, [*prompt, *c.token_ids.tolist()])[len(prompt) - 1 : -1]
                n = len(rows)
                settings = (torch.full((n,), x) for x in (0.7, top_k or 0, 0.0 if top_p == 1 else top_p))
                expected = sampling_logprobs(rows, *settings)[range(n), c.token_ids.tolist()].numpy()
                worst = max(worst, float(np.abs(expected - c.logprobs).max()))
    engine.close()
    return worst


def test_logprobs_are_those_of_the_filtered_distribution():
    assert run_world(filtered, g.recipe())[0] <= 1e-5


def staggered(seat, config):
    module, engine = g.build_engine(seat, config)
    prompts = [[(3 * i + j) % 41 for j in range(1 + i % 29)] for i in range(64)]

    async def one(index, prompt):
        await asyncio.sleep(0.002 * (index % 17))
        sampling = Sampling(max_new_tokens=1 + index % 23)
        return (await engine.generate(prompt, num_generations=1, sampling=sampling, request_id=f"{index}"))[0]

    async def everything():
        return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))

    answers = asyncio.run(everything())
    again = asyncio.run(everything())
    errors = [
        np.abs(c.logprobs - g.reference_logprobs(module, p, c.token_ids)).max()
        for p, c in zip(prompts, answers, strict=True)
    ]
    wrong_length = [i for i, c in enumerate(answers) if c.finish_reason == "length" and len(c.token_ids) != 1 + i % 23]
    repeated = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(answers, again, strict=True)]
    padded = max(int(c.token_ids.max()) for c in answers)
    running = engine.num_running
    engine.close()
    return max(errors), wrong_length, repeated, padded, running


def test_64_staggered_requests_are_each_right_and_repeat_whatever_the_timing():
    error, wrong_length, repeated, highest, running = run_world(staggered, g.recipe())[0]
    assert error <= 1e-5 and not wrong_length and running == 0
    assert highest < g.VOCAB
    assert all(repeated)


def test_more_requests_than_the_engine_holds_wait_their_turn():
    config = g.recipe(buffer_size_gb=2e-4)  # a handful of blocks
    error, wrong_length, *_ = run_world(staggered, config)[0]
    assert error <= 1e-5 and not wrong_length


def test_prompts_longer_than_a_step_are_prefilled_in_chunks():
    config = g.recipe(max_tokens=64, enable_chunked_prefill=True)
    error, wrong_length, *_ = run_world(staggered, config)[0]
    assert error <= 1e-5 and not wrong_length


def padded_ids_never_sampled(seat, config):
    module, engine = g.build_engine(seat, config, sharpen=0.0)  # all real ids equally likely
    groups = complete(engine, [[1, 2, 3]], Sampling(max_new_tokens=60), num_generations=32)
    engine.close()
    tokens = np.concatenate([c.token_ids for c in groups[0]])
    return module.output_layer.weight.shape[0], np.unique(tokens).tolist(), float(groups[0][0].logprobs[0])


def test_padded_vocabulary_ids_have_no_mass():
    rows, seen, logprob = run_world(padded_ids_never_sampled, g.recipe())[0]
    assert rows > g.VOCAB
    assert seen == list(range(g.VOCAB))
    assert abs(logprob + np.log(g.VOCAB)) < 1e-5


def stops(seat, config):
    _, engine = g.build_engine(seat, config, sharpen=1.0)
    free = complete(engine, [[4, 5, 6]], Sampling(max_new_tokens=40), num_generations=16)[0]
    stopped = complete(engine, [[4, 5, 6]], Sampling(max_new_tokens=40, stop_token_ids=(9, 17)), num_generations=16)[0]
    engine.close()
    return [[(c.token_ids.tolist(), c.finish_reason, len(c.logprobs)) for c in group] for group in (free, stopped)]


def cut_after_first(tokens, stop_ids):
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def test_a_stop_token_ends_the_completion_and_is_returned_once():
    free, stopped = run_world(stops, g.recipe())[0]
    reasons = set()
    for (tokens, reason, num_logprobs), (all_tokens, _, _) in zip(stopped, free, strict=True):
        assert tokens == cut_after_first(all_tokens, (g.EOS, 9, 17))
        assert reason == ("stop" if tokens[-1] in (g.EOS, 9, 17) else "length")
        assert num_logprobs == len(tokens)
        reasons.add(tokens[-1] if reason == "stop" else reason)
    assert {9, 17} <= reasons
    assert {"stop", "length"} == {reason for _, reason, _ in free}


def refusals(seat, config):
    _, engine = g.build_engine(seat, config)
    cases = {
        "long": ([1] * 90, Sampling(max_new_tokens=7)),
        "empty": ([], Sampling(max_new_tokens=7)),
        "foreign": ([1, g.VOCAB], Sampling(max_new_tokens=7)),
        "strings": ([1], Sampling(max_new_tokens=7, stop_strings=("a",))),
    }
    messages = {}
    for name, (prompt, sampling) in cases.items():
        with pytest.raises(ConfigError) as error:
            complete(engine, [prompt], sampling)
        messages[name] = str(error.value)
    fits = complete(engine, [[1] * 90], Sampling(max_new_tokens=6))[0][0]
    engine.close()
    return messages, fits.finish_reason, len(fits.token_ids)


def test_requests_the_engine_cannot_take_are_refused_with_the_numbers():
    messages, reason, length = run_world(refusals, g.recipe())[0]
    assert "90 prompt tokens + max_new_tokens 7 exceed the engine's 96" in messages["long"]
    assert "empty" in messages["empty"] and "stop_token_ids" in messages["strings"]
    assert f"token {g.VOCAB}" in messages["foreign"] and f"vocabulary of {g.VOCAB}" in messages["foreign"]
    assert (reason, length) == ("length", 6) or reason == "stop"


def cancelled(seat, config):
    _, engine = g.build_engine(seat, config, sharpen=1.0)

    async def scenario():
        sampling = Sampling(max_new_tokens=80)
        task = asyncio.create_task(engine.generate([1, 2], num_generations=4, sampling=sampling, request_id="gone"))
        while engine.num_running < 4:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        running = engine.num_running
        after = await engine.generate([1, 2], num_generations=1, sampling=sampling, request_id="next")
        while engine.num_running:
            await asyncio.sleep(0.005)
        return running, len(after)

    result = asyncio.run(scenario())
    engine.close()
    return result


def test_a_cancelled_call_leaves_the_engine_usable_and_is_counted_until_done():
    assert run_world(cancelled, g.recipe())[0] == (4, 1)


def replicas(seat, config):
    module, engine = g.build_engine(seat, config)
    before = engine._engine.finished_request_count
    groups = sample_on_primary(seat, engine, PROMPTS, Sampling(max_new_tokens=10), num_generations=4)
    worst = max(
        float(np.abs(c.logprobs - g.reference_logprobs(module, p, c.token_ids)).max())
        for p, group in zip(PROMPTS, groups, strict=True)
        for c in group
    )
    share(None)
    served = engine._engine.finished_request_count - before
    engine.close()
    return worst, served


def test_requests_are_spread_over_data_parallel_replicas():
    answers = run_world(replicas, g.recipe(), size=2, tp=1)
    assert max(error for error, _ in answers) <= 1e-5
    assert sum(served for _, served in answers) == 12 and min(served for _, served in answers) >= 4
