"""The parts of generation that need no engine: draws, the sampling distribution, versions of tokens, sizes."""

import math

import numpy as np
import pytest
import torch

from megatron_grpo.errors import ConfigError
from tests.megatron import generation


@pytest.fixture(scope="module")
def sampling():
    from megatron_grpo.engines.megatron import sampling

    return sampling


def settings(n, temperature=1.0, top_k=0, top_p=0.0):
    return torch.full((n,), temperature), torch.full((n,), top_k, dtype=torch.int32), torch.full((n,), top_p)


def test_plain_distribution_is_the_softmax_of_scaled_logits(sampling):
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    got = sampling.sampling_logprobs(logits, *settings(5, temperature=0.7))
    torch.testing.assert_close(got, torch.log_softmax(logits / 0.7, -1))


def loop_filter(logits, top_k, top_p):
    """The definition in words: best tokens first, at most k, until their share of the k reaches p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[: top_k or len(order)]
    mass = sum(math.exp(logits[i]) for i in kept)
    chosen, reached = [], 0.0
    for i in kept:
        chosen.append(i)
        reached += math.exp(logits[i]) / mass
        if top_p and reached >= top_p:
            break
    total = math.log(sum(math.exp(logits[i]) for i in chosen))
    return [logits[i] - total if i in chosen else -math.inf for i in range(len(logits))]


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 0.0), (0, 0.6), (5, 0.8), (1, 0.0), (0, 0.01), (11, 0.999)])
def test_filters_equal_their_definition(sampling, top_k, top_p):
    logits = torch.randn(20, 11, generator=torch.Generator().manual_seed(1))
    got = sampling.sampling_logprobs(logits, *settings(20, top_k=top_k, top_p=top_p))
    expected = torch.tensor([loop_filter(row, top_k, top_p) for row in logits.tolist()])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_rows_with_different_settings_do_not_disturb_each_other(sampling):
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(2))
    temperature, top_k, top_p = (
        torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0, 3, 0]), torch.tensor([0.0, 0.0, 0.7])
    )  # fmt: skip
    together = sampling.sampling_logprobs(logits, temperature, top_k, top_p)
    for row in range(3):
        one = slice(row, row + 1)
        alone = sampling.sampling_logprobs(logits[one], temperature[one], top_k[one], top_p[one])
        torch.testing.assert_close(together[one], alone)


def test_draws_follow_the_distribution_and_never_hit_mass_zero(sampling):
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    n = 40_000
    uniform = sampling.uniforms(np.arange(n), np.full(n, 17))
    tokens = sampling.draw(probs.log().expand(n, -1), torch.from_numpy(uniform))
    counts = torch.bincount(tokens, minlength=6) / n
    assert counts[[0, 2, 5]].sum() == 0
    # 5 standard deviations of a share of one half at this size
    torch.testing.assert_close(counts, probs, atol=5 * 0.5 / n**0.5, rtol=0.0)


def test_the_ends_of_the_unit_interval_draw_valid_tokens(sampling):
    logprobs = torch.tensor([0.0, 0.4, 0.6, 0.0]).log().expand(2, -1)
    assert sampling.draw(logprobs, torch.tensor([0.0, 1 - 2.0**-40], dtype=torch.float64)).tolist() == [1, 2]


def test_uniforms_of_neighbouring_streams_and_positions_are_unrelated(sampling):
    streams, positions = np.meshgrid(np.arange(200), np.arange(200))
    grid = sampling.uniforms(streams.ravel(), positions.ravel()).reshape(200, 200)
    assert 0 <= grid.min() and grid.max() < 1
    assert abs(grid.mean() - 0.5) < 5 * 12**-0.5 / 200
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / 200


def test_streams_differ_by_each_of_their_parts(sampling):
    parts = [(1, 2, "a", 3), (2, 2, "a", 3), (1, 3, "a", 3), (1, 2, "b", 3), (1, 2, "a", 4)]
    streams = [sampling.stream_id(*part) for part in parts]
    assert len(set(streams)) == len(parts) and all(0 <= stream < 2**63 for stream in streams)
    assert sampling.stream_id(1, 2, "a", 3) == streams[0]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([[0, 4]], [4, 4, 4, 4]),
        # prompt 20: version 2 set after 2 generated tokens, when token 21 was the last known one
        ([[0, 1], [21, 2]], [1, 1, 2, 2]),
        ([[0, 1], [19, 2], [22, 3]], [2, 2, 2, 3]),
        # twice between the same two tokens: only the last one counts
        ([[0, 1], [20, 2], [20, 3]], [1, 3, 3, 3]),
        ([[0, 1], [30, 2]], [1, 1, 1, 1]),
    ],
)
def test_token_versions_follow_the_boundary_rule(spans, expected):
    from megatron_grpo.engines.megatron.versions import token_versions

    got = token_versions(spans, prompt_length=20, num_generated=4)
    assert got.dtype == np.int32 and got.tolist() == expected


def test_sizes_hold_what_the_loop_keeps_in_flight_and_no_more():
    from megatron_grpo.engines.megatron.engine_setup import engine_sizes

    config = generation.recipe(max_model_len=96, block_size_tokens=16, buffer_size_gb=1.0)
    sizes = engine_sizes(config, block_bytes=1024, tp=1)
    assert sizes.max_requests == 256  # max_val_samples outnumber the 8 x 8 of a step
    assert sizes.num_blocks == 256 * 6 + 1


def test_a_buffer_too_small_for_one_request_is_refused():
    from megatron_grpo.engines.megatron.engine_setup import engine_sizes

    config = generation.recipe(max_model_len=96, block_size_tokens=16, buffer_size_gb=1e-5)
    with pytest.raises(ConfigError, match="buffer_size_gb"):
        engine_sizes(config, block_bytes=4096, tp=1)
