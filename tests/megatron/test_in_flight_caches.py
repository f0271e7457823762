"""What a stop without a weight change leaves alone, the memory each cache mode releases, constants for decoding."""

import asyncio
import logging

import pytest
import torch

from megatron_grpo.errors import ConfigError
from tests.megatron import generation as g
from tests.megatron.refits import Owner, Weights
from tests.megatron.world import run_world

MODES = ("persist", "offload", "recompute")
PROMPT = [3, 5, 7, 9, 11]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def memory(seat, config):
    """Bytes (held, released) in every state, and the log lines of one pause and one sleep with a running group."""
    _, engine = g.build_engine(seat, config, eos_id=g.VOCAB)
    owner, heard, bytes_in = Owner(seat, engine, Weights(engine._module)), Lines(), {}
    logger = logging.getLogger("megatron_grpo.engines.megatron.inference")
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)

    def note(state):
        now = engine.kv_bytes()
        bytes_in[state] = (now.held, now.released)

    async def scenario():
        note("running")
        group = owner.generate(PROMPT, 90, "group", 3)
        await owner.until(5, 3)
        await engine.pause()
        note("paused")
        await engine.pause()  # harmless
        await engine.resume()
        note("resumed")
        await engine.sleep()
        note("asleep")
        await engine.wake()
        note("awake")
        await engine.wake()  # harmless
        await engine.resume()
        return await group

    lengths = {len(completion.token_ids) for completion in asyncio.run(scenario())}
    engine.close()
    return bytes_in, heard.lines, lengths


@pytest.mark.parametrize("mode", MODES)
def test_bytes_released_while_paused_and_asleep(mode):
    bytes_in, lines, lengths = run_world(memory, g.recipe(kv_cache_management_mode=mode))[0]
    full, nothing = bytes_in["running"]
    assert full > 0 and nothing == 0 and lengths == {90}
    everything, released = (full, 0), (0, full)
    assert bytes_in["resumed"] == bytes_in["awake"] == everything
    assert bytes_in["paused"] == (released if mode == "recompute" else everything)
    assert bytes_in["asleep"] == (everything if mode == "persist" else released)
    suspensions = [line for line in lines if "suspended" in line]
    assert len(suspensions) == (2 if mode == "recompute" else 1)
    held, gone = bytes_in["asleep"]
    assert f"3 unfinished requests; cache ({mode}): {held} bytes held, {gone} released" in suspensions[-1]


def undisturbed(seat, config):
    """The tokens of a group without a stop, and of the same group with a pause and a sleep but the same weights."""
    _, engine = g.build_engine(seat, config, eos_id=g.VOCAB)
    owner = Owner(seat, engine, Weights(engine._module))

    async def known(num_tokens):
        if seat.rank == 0:  # the others wait for its signal
            await owner.until(num_tokens, 4 // seat.world.dp)

    async def scenario():
        plain = await owner.generate(PROMPT, 80, "same", 4)
        stopped = owner.generate(PROMPT, 80, "same", 4)
        await known(10)
        await owner.refit_in_flight(0)
        await known(25)
        await owner.refit_asleep(0)
        groups = owner.share((plain, await stopped))
        return [[completion.token_ids.tolist() for completion in group] for group in groups]

    plain, stopped = asyncio.run(scenario())
    engine.close()
    return plain, stopped


@pytest.mark.parametrize(("mode", "num_replicas"), [*((mode, 1) for mode in MODES), ("recompute", 2)])
def test_a_stop_without_new_weights_changes_no_token(mode, num_replicas):
    config = g.recipe(kv_cache_management_mode=mode)
    for plain, stopped in run_world(undisturbed, config, size=num_replicas):
        assert plain == stopped and {len(tokens) for tokens in plain} == {80}


def mamba_layers(seat, config):
    from megatron.core.ssm.mamba_mixer import MambaMixer

    class Mixer(MambaMixer):
        """No layer at all: only the mark that says whether decoding derives its constants again."""

        def __init__(self):
            torch.nn.Module.__init__(self)
            self._A_neg_exp_cache_stale = False

    module, engine = g.build_engine(seat, config)
    mixers = [Mixer(), Mixer()]
    module.add_module("mixers", torch.nn.ModuleList(mixers))
    running = [mixer._A_neg_exp_cache_stale for mixer in mixers]
    asyncio.run(engine.pause())
    paused = [mixer._A_neg_exp_cache_stale for mixer in mixers]
    engine.close()
    return running, paused


def test_a_pause_makes_mamba_layers_derive_their_decode_constants_again():
    assert run_world(mamba_layers, g.recipe())[0] == ([False, False], [True, True])


def too_long_for_one_step(seat, config):
    with pytest.raises(ConfigError) as error:
        g.build_engine(seat, config)
    return str(error.value)


def test_a_restarted_request_must_fit_one_step_without_chunks():
    config = g.recipe(enable_chunked_prefill=False, max_tokens=64, max_model_len=96)
    message = run_world(too_long_for_one_step, config)[0]
    assert "max_tokens (64)" in message and "max_model_len (96)" in message and "enable_chunked_prefill" in message
