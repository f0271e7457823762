"""Cached prefixes over weight changes: hits within a version, none across, log-probs of a fresh engine."""

import asyncio
import time
from functools import partial

import numpy as np
import pytest

from tests.megatron import generation as g
from tests.megatron.refits import Owner, Weights
from tests.megatron.world import run_world

MODES = ("persist", "offload", "recompute")
BLOCK = 16
LONG = 1000  # tokens of a prompt that takes sixteen steps to prefill


def prompt_of(num_tokens):
    return [(5 * i) % 41 for i in range(num_tokens)]


def choose_eviction(policy):
    """Megatron's default forgets a prefix with its last request; under "lru" idle blocks keep theirs."""
    from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy

    from megatron_grpo.engines.megatron import engine_setup

    chosen = PrefixCachingEvictionPolicy(policy)
    engine_setup.InferenceConfig = partial(InferenceConfig, prefix_caching_eviction_policy=chosen)


class Probe:
    """Asks for a few tokens; remembers the answers until nothing steps, and the tokens served from cached prefixes."""

    def __init__(self, owner, prompt):
        self._owner, self._prompt, self._answers = owner, prompt, []

    async def ask(self, version, max_new_tokens=4, num_generations=1):
        """Number of prompt tokens that were not computed."""
        before, name = self._num_cached(), f"probe {len(self._answers)}"
        group = await self._owner.generate(self._prompt, max_new_tokens, name, num_generations)
        self._answers.append((version, group))
        return self._num_cached() - before

    def _num_cached(self):
        return self._owner.engine._engine._prefill_tokens_skipped

    def largest_error(self, weights):
        """Against a forward pass under the version each answer was asked of; with the engine at rest."""
        errors = []
        for version, group in self._answers:
            assert {int(v) for c in group for v in c.token_versions} == {version}
            weights.set(version)
            expected = [g.reference_logprobs(weights.module, self._prompt, c.token_ids) for c in group]
            errors += [np.abs(e - c.logprobs).max() for e, c in zip(expected, group, strict=True)]
        return float(max(errors))


def over_changes(seat, config, policy):
    choose_eviction(policy)
    module, engine = g.build_engine(seat, config, sharpen=2.0, eos_id=g.VOCAB)
    weights = Weights(module)
    owner, prompt, cached = Owner(seat, engine, weights), prompt_of(50), {}
    probe = Probe(owner, prompt)
    allocator = engine._engine.context.kv_block_allocator
    num_free = allocator.total_avail

    async def scenario():
        for name, refit, running, idle in [
            ("awake", owner.refit_in_flight, 1, 2),
            ("asleep", owner.refit_asleep, 3, 4),
        ]:
            long = owner.generate(prompt, 100, f"long {name}", 2)
            await owner.until(5, 2)
            await refit(running)
            cached[name, "first of the new version"] = await probe.ask(running)
            cached[name, "its siblings"] = await probe.ask(running, num_generations=3)
            assert len(owner.known()) >= 2, "the long requests had ended: this case shows nothing"
            await long
            cached[name, "idle, same version"] = await probe.ask(running)
            await refit(idle)
            cached[name, "idle, new version"] = await probe.ask(idle)
        await engine.pause()

    asyncio.run(scenario())
    engine.close()
    return cached, probe.largest_error(weights), num_free - allocator.total_avail


@pytest.mark.parametrize("policy", ["ref_zero", "lru"])
@pytest.mark.parametrize("mode", MODES)
def test_prefixes_are_shared_within_a_version_and_never_across(mode, policy):
    config = g.recipe(enable_prefix_caching=True, kv_cache_management_mode=mode, max_model_len=160)
    cached, error, num_leaked = run_world(over_changes, config, policy)[0]
    assert error <= 1e-5 and num_leaked == 0
    for name in ("awake", "asleep"):
        assert cached[name, "first of the new version"] == cached[name, "idle, new version"] == 0
        assert cached[name, "its siblings"] >= 2 * 3 * BLOCK
        assert (cached[name, "idle, same version"] > 0) == (policy == "lru")


def half_prefilled(seat, config):
    """A change in the middle of a prompt's chunks; siblings ask for the same prompt while it goes on and after."""
    module, engine = g.build_engine(seat, config, sharpen=2.0, eos_id=g.VOCAB)
    weights = Weights(module)
    owner, prompt = Owner(seat, engine, weights), prompt_of(LONG)
    probe = Probe(owner, prompt)

    async def scenario():
        slow = module.decoder.register_forward_pre_hook(lambda *_: time.sleep(0.02))  # the pause must come in time
        first = owner.generate(prompt, 200, "half prefilled")
        while not (requests := list(engine._engine.requests.values())) or not progress(requests[0]):
            await asyncio.sleep(0.0005)

        async def count():
            nonlocal at_change
            at_change = progress(requests[0])
            assert not requests[0].record[-1].generated_tokens, "prefilled before the pause: this case shows nothing"

        at_change = 0
        await owner.refit_in_flight(1, count)
        slow.remove()
        cached = [await probe.ask(1, max_new_tokens=2), await probe.ask(1, num_generations=2)]
        running = len(owner.known())
        return at_change, cached, running, (await first)[0]

    at_change, cached, running, completion = asyncio.run(scenario())
    engine.close()
    tokens = [*prompt, *completion.token_ids.tolist()]
    weights.set(0)
    _, old = g.logits_with_old_keys(module, tokens, [], 0)
    weights.set(1)
    logits, _ = g.logits_with_old_keys(module, tokens, old, at_change)
    error = np.abs(g.chosen_logprobs(logits, prompt, completion.token_ids) - completion.logprobs).max()
    return (
        at_change,
        cached,
        running,
        float(error),
        probe.largest_error(weights),
        set(completion.token_versions.tolist()),
    )


def progress(entry):
    return entry.record[-1].finished_chunk_token_count


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_half_prefilled_at_a_change_offers_none_of_its_blocks(mode):
    config = g.recipe(
        enable_prefix_caching=True, kv_cache_management_mode=mode, max_tokens=64, max_model_len=LONG + 200
    )
    at_change, cached, running, error, error_of_siblings, versions = run_world(half_prefilled, config)[0]
    assert running >= 1, "the request had ended: this case shows nothing"
    assert versions == {1} and error <= 1e-5 and error_of_siblings <= 1e-5
    # A recompute starts the prompt over: all of its blocks are new ones.
    assert (at_change == 0) == (mode == "recompute")
    assert cached[1] >= LONG - 2 * BLOCK
