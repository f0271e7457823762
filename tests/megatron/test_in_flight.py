"""One long request across three weight changes, in every cache mode: each token's log-prob and version.

The reference of `persist` and `offload` is nested: under version v the keys and values of positions before its start
are those that were in use under version v - 1, whatever produced them. That of `recompute` is a plain forward pass
under version v. Positions are inputs: with k tokens known at a change, the first P + k - 1 have their keys cached.
"""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_grpo.types import Completion
from tests.megatron import generation as g
from tests.megatron.refits import Owner, Weights
from tests.megatron.world import run_world

PROMPT = [(5 * i + 3) % 41 for i in range(20)]
NUM_NEW = 120
NUM_SIBLINGS = 2
MODES = ("persist", "offload", "recompute")


@dataclass(frozen=True)
class Request:
    """An answered request and, for each weight version it met, its first token."""

    completion: Completion
    starts: list[int]

    def own_rows(self, by_version):
        """Log-probs of every token under the version that should have made it, from those [V, T] under each."""
        ends = [*self.starts[1:], len(self.completion.token_ids)]
        segments = (row[a:b] for row, a, b in zip(by_version, self.starts, ends, strict=True))
        return np.concatenate(list(segments))


def keeping_reference(weights, request, first_version):
    """Log-probs [V, T] of all tokens under each version, old keys kept."""
    tokens, rows, used = [*PROMPT, *request.completion.token_ids.tolist()], [], []
    for number, start in enumerate(request.starts):
        weights.set(first_version + number)
        num_old = len(PROMPT) + start - 1 if number else 0
        logits, used = g.logits_with_old_keys(weights.module, tokens, used, num_old)
        rows.append(g.chosen_logprobs(logits, PROMPT, request.completion.token_ids))
    return rows


def fresh_reference(weights, request, first_version):
    rows = []
    for number in range(len(request.starts)):
        weights.set(first_version + number)
        rows.append(g.reference_logprobs(weights.module, PROMPT, request.completion.token_ids))
    return rows


async def across_three_refits(owner, refit, first_version):
    """A group over three changes; at the second a short group is submitted while nothing runs."""
    long, starts, late = (
        owner.generate(PROMPT, NUM_NEW, f"from {first_version}", NUM_SIBLINGS),
        [[0] * NUM_SIBLINGS],
        None,
    )

    async def count():
        nonlocal late
        if len(starts) == 2:
            late = owner.generate(PROMPT, 4, f"late {first_version}", NUM_SIBLINGS)
            await asyncio.sleep(0.1)
            assert not late.done() or owner.seat.rank
        starts.append(owner.known()[:NUM_SIBLINGS])

    for number in (1, 2, 3):
        if owner.seat.rank == 0:
            await owner.until(starts[-1][0] + 10, NUM_SIBLINGS)
        await refit(first_version + number, count)
    longs, lates = owner.share((await long, await late))
    requests = [Request(c, [at[i] for at in starts]) for i, c in enumerate(longs)]
    return requests, [(c, first_version + 2) for c in lates]


def scenario(seat, config):
    module, engine = g.build_engine(seat, config, sharpen=2.0, eos_id=g.VOCAB)
    mode = config.policy.generation.mcore_generation_config.kv_cache_management_mode
    weights, facts = Weights(module), []
    owner = Owner(seat, engine, weights)

    async def both():
        awake = await across_three_refits(owner, owner.refit_in_flight, 0)
        asleep = await across_three_refits(owner, owner.refit_asleep, 3)
        return [(0, *awake), (3, *asleep)]

    results = asyncio.run(both())
    engine.close()
    references = {"kept": keeping_reference, "rebuilt": fresh_reference}
    right, wrong = ("rebuilt", "kept") if mode == "recompute" else ("kept", "rebuilt")
    for first, requests, lates in results:
        for request in requests:
            rows = {name: request.own_rows(f(weights, request, first)) for name, f in references.items()}
            got, after = request.completion.logprobs, request.starts[1]
            facts.append(
                {
                    "starts": request.starts,
                    "versions": (request.completion.token_versions - first).tolist(),
                    "error": float(np.abs(rows[right] - got).max()),
                    "error of the other rule": float(np.abs(rows[wrong] - got)[after:].max()),
                }
            )
        for completion, version in lates:
            weights.set(version)
            error = np.abs(g.reference_logprobs(module, PROMPT, completion.token_ids) - completion.logprobs).max()
            facts.append({"late": float(error), "versions": (completion.token_versions - version).tolist()})
    return facts


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_token_follows_its_version_and_the_cache_rule(mode, tp):
    # With cached prefixes on two ranks: both must forget the same ones, or their steps part.
    config = g.recipe(tp=tp, kv_cache_management_mode=mode, max_model_len=160, enable_prefix_caching=tp > 1)
    for facts in run_world(scenario, config, size=tp, tp=tp, timeout_s=120):
        longs, lates = ([f for f in facts if ("late" in f) == late] for late in (False, True))
        assert len(longs) == len(lates) == 2 * NUM_SIBLINGS  # in flight, then colocated
        for fact in longs:
            starts = fact["starts"]
            assert starts[0] == 0 and min(np.diff([*starts, NUM_NEW])) >= 5, starts
            assert fact["versions"] == np.repeat(range(4), np.diff([*starts, NUM_NEW])).tolist()
            assert fact["error"] <= 1e-5, fact
            assert fact["error of the other rule"] > 1e-3, fact
        for fact in lates:
            assert fact["late"] <= 1e-5 and set(fact["versions"]) == {0}, fact
