"""Requests in vLLM's words, and its answers in ours. Pure translation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from ...errors import ConfigError, RunFailed
from ...types import Completion, Sampling


def request_seed(seed: int, version: int, request_id: str, index: int) -> int:
    """The seed of completion `index` of a request made under weight version `version`; 63 bits."""
    text = f"{seed}/{version}/{index}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


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
                f"{self.max_length} (policy.generation.vllm_cfg.max_model_len)"
            )

    def sampling_params(self, sampling: Sampling, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=min(sampling.top_k or 0, self.vocab_size),  # 0 filters nothing
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            logprobs=0,  # of the sampled token only
            stop_token_ids=sorted({self.eos_id, *sampling.stop_token_ids}),
            stop=list(sampling.stop_strings),
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,  # a stop string may be the text of one
            output_kind=RequestOutputKind.DELTA,
        )


@dataclass(kw_only=True, slots=True)
class Gathered:
    """The deltas of one request, added up."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: Any = None  # vLLM's CompletionOutput of the latest delta

    def add(self, output: RequestOutput) -> None:
        self.last = delta = output.outputs[0]
        self.tokens += delta.token_ids
        self.logprobs += [
            of_position[token].logprob for token, of_position in zip(delta.token_ids, delta.logprobs or (), strict=True)
        ]

    def completion(self) -> Completion:
        """The finished request, checked. Raises RunFailed with the engine's words when it gave up."""
        if self.last is None or self.last.finish_reason not in ("stop", "length"):
            reason = None if self.last is None else self.last.finish_reason
            raise RunFailed(f"request {self.request_id}: the engine ended it with finish_reason {reason!r}")
        return Completion(
            token_ids=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            token_versions=self._versions(),
            finish_reason=self.last.finish_reason,
        )

    def _versions(self) -> np.ndarray:
        """int32 [N] from the engine's spans [start, end), which must cover every token."""
        spans = self.last.weight_versions or ()
        versions = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
        assert len(versions) == len(self.tokens), f"request {self.request_id}: {spans} for {len(self.tokens)} tokens"
        return versions.astype(np.int32)
