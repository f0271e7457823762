"""What the engine returned: refused when a group cannot be built from it, turned into text for the verifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import MegatronGrpoError
from ..interfaces import Tokenizer
from ..types import Completion, Sampling


class BadCompletion(MegatronGrpoError):
    """The engine returned something that must not be trained on; names the completion and what is wrong."""


def check_completions(completions: Sequence[Completion], num_generations: int, source: str) -> None:
    """Raise BadCompletion unless there are `num_generations` and each is whole, with finite log-probs."""
    if len(completions) != num_generations:
        raise BadCompletion(f"the engine returned {len(completions)} of {num_generations} completions of {source}")
    for index, completion in enumerate(completions):
        fault = _fault(completion)
        if fault is not None:
            raise BadCompletion(f"completion {index} of {source}: {fault}")


def _fault(completion: Completion) -> str | None:
    num = len(completion.token_ids)
    lengths = (num, len(completion.logprobs), len(completion.token_versions))
    if len(set(lengths)) != 1:
        return f"it has {lengths[0]} tokens, {lengths[1]} log-probs and {lengths[2]} versions"
    wrong = np.flatnonzero(~np.isfinite(completion.logprobs))
    if wrong.size:
        at = int(wrong[0])
        return (
            f"the log-prob of token {at} of {num} (id {int(completion.token_ids[at])}) is {completion.logprobs[at]}; "
            f"{wrong.size} are not finite"
        )
    return None


def response_text(completion: Completion, tokenizer: Tokenizer, sampling: Sampling) -> str:
    """The text that is scored: without the stop token (eos always is one) or stop string that ended it."""
    ids = [int(token) for token in completion.token_ids]
    if ids and ids[-1] in (tokenizer.eos_id, *sampling.stop_token_ids):
        ids.pop()
    text = tokenizer.decode(ids)
    for stop in sampling.stop_strings:
        if completion.finish_reason == "stop" and text.endswith(stop):
            return text.removesuffix(stop)
    return text
