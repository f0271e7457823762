"""Requests in Megatron's words, and its answers in ours. Pure translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams

from ...errors import ConfigError, RunFailed
from ...types import Completion, Sampling
from .sampling import carry_stream
from .versions import token_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRules:
    """What an engine takes, and how its requests end. `max_length` counts prompt and generated tokens."""

    vocab_size: int
    eos_id: int
    max_length: int

    def check(self, prompt: Sequence[int], sampling: Sampling, request_id: str) -> None:
        """Raise ConfigError with everything that is wrong with a request."""
        if problems := list(self._problems(prompt, sampling)):
            raise ConfigError([f"request {request_id}: {problem}" for problem in problems])

    def _problems(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
        if not prompt:
            yield "the prompt is empty"
        if bad := [token for token in prompt if not 0 <= token < self.vocab_size]:
            yield f"token {bad[0]} of the prompt lies outside the vocabulary of {self.vocab_size}"
        if sampling.max_new_tokens < 1:
            yield f"max_new_tokens is {sampling.max_new_tokens}; at least 1 must be generated"
        if len(prompt) + sampling.max_new_tokens > self.max_length:
            yield (
                f"{len(prompt)} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed the engine's "
                f"{self.max_length} (policy.generation.mcore_generation_config.max_model_len)"
            )
        if sampling.stop_strings:
            yield "stop_strings need text, which this engine does not see: use stop_token_ids"

    def stops(self, sampling: Sampling) -> frozenset[int]:
        return frozenset((self.eos_id, *sampling.stop_token_ids))

    def sampling_params(self, sampling: Sampling, stream: int) -> SamplingParams:
        greedy = sampling.temperature == 0
        params = SamplingParams(
            temperature=1.0 if greedy else sampling.temperature,
            top_k=1 if greedy else min(sampling.top_k or 0, self.vocab_size),
            top_p=0.0 if greedy or sampling.top_p >= 1 else sampling.top_p,
            num_tokens_to_generate=sampling.max_new_tokens,
            return_log_probs=True,
            skip_prompt_log_probs=True,
            # Megatron ends a request on one id without delay and on "words" one step later; see IdTokenizer.
            termination_id=self.eos_id,
            stop_words=[str(token) for token in sorted(self.stops(sampling) - {self.eos_id})] or None,
            detokenize_stop_sequence=True,
        )
        carry_stream(params, stream)
        return params

    def completion(self, reply: dict[str, Any], prompt_length: int, sampling: Sampling, request_id: str) -> Completion:
        """The engine's answer to one request, checked. Raises RunFailed with its own words when it gave up."""
        tokens, logprobs = reply["generated_tokens"], reply["generated_log_probs"]
        if reply["status"] != Status.COMPLETED.name:
            raise RunFailed(f"request {request_id}: the engine answered {reply['status']}: {reply['events']}")
        assert len(tokens) == len(logprobs) > 0, (
            f"request {request_id}: {len(tokens)} tokens, {len(logprobs)} log-probs"
        )
        return Completion(
            token_ids=np.asarray(tokens, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            token_versions=token_versions(reply["policy_epoch"], prompt_length, len(tokens)),
            finish_reason="stop" if tokens[-1] in self.stops(sampling) else "length",
        )
