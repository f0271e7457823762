"""`token_scores` against torch's log_softmax, on one rank and on shards of the vocabulary."""

import math

import numpy as np
import pytest
import torch

from tests.megatron.world import run_world

SHAPE = (3, 5)
WIDTH = 24
NUM_REAL = 21


def random_logits() -> torch.Tensor:
    """[3, 5, 24] float32 with the last ids at -inf, as padding of the vocabulary is."""
    logits = 3 * torch.randn(*SHAPE, WIDTH, generator=torch.Generator().manual_seed(0))
    logits[..., NUM_REAL:] = -math.inf
    return logits


def random_targets() -> torch.Tensor:
    return torch.randint(0, NUM_REAL, SHAPE, generator=torch.Generator().manual_seed(1))


def weights_of(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def loss_of(logprobs, entropy):
    """Weights above 1 in size show an overflow of 0 x a large number."""
    loss = (logprobs * weights_of(2)).sum()
    return loss if entropy is None else loss + 10 * (entropy * weights_of(3)).sum()


def expected(temperature: float, with_entropy: bool):
    logits = random_logits()[..., :NUM_REAL].double().requires_grad_()
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(-1, random_targets()[..., None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1) if with_entropy else None
    loss_of(chosen, entropy).backward()
    gradient = torch.nn.functional.pad(logits.grad, (0, WIDTH - NUM_REAL))
    return chosen.detach(), None if entropy is None else entropy.detach(), gradient


def score_shard(seat, temperature, with_entropy, chunk):
    seat.join()
    from megatron.core import parallel_state

    from megatron_grpo.engines.megatron import logprobs

    logprobs.CHUNK_ELEMENTS = chunk
    width = WIDTH // seat.world.tp
    shard = random_logits().narrow(-1, seat.rank * width, width).contiguous().requires_grad_()
    scores = logprobs.token_scores(
        shard,
        random_targets(),
        temperature=temperature,
        with_entropy=with_entropy,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    loss_of(scores.logprobs, scores.entropy).backward()
    assert (scores.entropy is not None) == with_entropy
    entropy = scores.entropy.detach().numpy() if with_entropy else None
    return scores.logprobs.detach().numpy(), entropy, shard.grad.numpy()


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(("temperature", "with_entropy", "chunk"), [(1.0, False, 1 << 24), (0.7, True, 40)])
def test_scores_and_gradients_equal_log_softmax(tp, temperature, with_entropy, chunk):
    logprobs, entropy, gradient = expected(temperature, with_entropy)
    answers = run_world(score_shard, temperature, with_entropy, chunk, size=tp, tp=tp)
    for answer in answers:
        np.testing.assert_allclose(answer[0], logprobs, atol=1e-6)
        if with_entropy:
            np.testing.assert_allclose(answer[1], entropy, atol=1e-6)
    whole = np.concatenate([answer[2] for answer in answers], -1)
    assert np.abs(whole - gradient.numpy()).max() < 2e-6 * np.abs(gradient.numpy()).max()


def score_in_bfloat16(seat):
    from megatron_grpo.engines.megatron.logprobs import token_scores

    logits = random_logits().bfloat16().requires_grad_()
    scores = token_scores(logits, random_targets(), with_entropy=True)
    loss_of(scores.logprobs, scores.entropy).backward()
    exact = torch.log_softmax(logits.detach().double(), -1).gather(-1, random_targets()[..., None])[..., 0]
    return scores.logprobs.dtype, (scores.logprobs - exact).abs().max().item(), logits.grad.dtype


def test_sums_of_bfloat16_logits_are_taken_in_float32():
    ((dtype, error, gradient_dtype),) = run_world(score_in_bfloat16)
    assert dtype is torch.float32 and gradient_dtype is torch.bfloat16
    assert error < 1e-5


def check_numerically(seat):
    from megatron_grpo.engines.megatron.logprobs import token_scores

    logits = random_logits()[..., :NUM_REAL].double().requires_grad_()

    def both(logits):
        scores = token_scores(logits, random_targets(), temperature=1.3, with_entropy=True)
        return scores.logprobs, scores.entropy

    return torch.autograd.gradcheck(both, (logits,))


def test_the_gradient_is_the_derivative():
    assert run_world(check_numerically) == [True]
