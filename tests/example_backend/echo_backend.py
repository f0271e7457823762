"""A generation backend of another package, as small as it gets: it answers a prompt with the prompt's own tokens.

Started by `policy.generation.backend: echo`; see docs/backends.md. A real one would ask a server.
"""

import asyncio
from dataclasses import replace

import numpy as np

from megatron_grpo.interfaces import EngineCapabilities
from megatron_grpo.types import Completion


class EchoGenerator:
    """Travels to the collector's process. One token per turn of the event loop."""

    def __init__(self, eos_id):
        self._eos_id = eos_id
        self.num_running = 0

    async def generate(self, prompt_ids, *, num_generations, sampling, request_id):
        token_ids = np.array([*prompt_ids, self._eos_id][: sampling.max_new_tokens], np.int32)
        self.num_running += 1
        for _ in token_ids:
            await asyncio.sleep(0)
        self.num_running -= 1
        zeros = np.zeros(len(token_ids))
        reason = "stop" if token_ids[-1] == self._eos_id else "length"
        one = Completion(
            token_ids=token_ids,
            logprobs=zeros.astype(np.float32),
            token_versions=zeros.astype(np.int32),  # not tracked: the trainer takes the version at the group's start
            finish_reason=reason,
        )
        return [one] * num_generations


def add_up(module):
    """Runs on a policy rank."""
    return sum(float(parameter.detach().double().sum()) for parameter in module.parameters())


class EchoTransfer:
    """A real one would send the weights, and raise WeightSyncFailed unless what arrived is what was sent."""

    def __init__(self, policy):
        self._policy = policy
        self.received = []

    async def transfer(self):
        self.received.append(await self._policy.call(add_up))


class EchoBackend:
    """Backend and engine in one object. Without a pause hook `pause` and `resume` are never called."""

    capabilities = EngineCapabilities(
        pauses_in_flight=False, must_drain=False, blocks_training=False, wake_carries_weights=False, tracks_versions=False
    )

    def __init__(self, setting):
        self.setting = setting
        self.engine = self
        self.generator = EchoGenerator(setting.eos_id)
        self.transfer = EchoTransfer(setting.policy)
        self.versions = []

    async def start(self):
        pass

    async def close(self):
        pass

    async def set_version(self, version):
        self.versions.append(version)


class DrainingEchoBackend(EchoBackend):
    capabilities = replace(EchoBackend.capabilities, must_drain=True)


class SharingEchoBackend(EchoBackend):
    capabilities = replace(EchoBackend.capabilities, blocks_training=True)
