"""Random micro-batches for the loss tests, as arrays under the names of the fixtures."""

from itertools import product

import numpy as np
import torch
from hypothesis import strategies as st

from megatron_grpo.algorithms.loss import LossConfig, LossInputs, Normalizer

TOKEN_ARRAYS = ("curr", "prev", "gen", "ref", "adv", "entropy")


def random_batch(seed: int, num_rows: int = 4, width: int = 6) -> dict[str, np.ndarray]:
    """Rows of different lengths, a prompt in front, padding behind; sometimes masked or empty rows."""
    rng = np.random.default_rng(seed)
    batch = {name: rng.normal(-1.0, 0.5, (num_rows, width)) for name in ("curr", "prev", "gen", "ref")}
    batch["adv"] = np.repeat(rng.normal(0, 1, (num_rows, 1)), width, axis=1)
    batch["entropy"] = rng.uniform(0, 2, (num_rows, width))
    starts, ends = rng.integers(0, 3, (num_rows, 1)), rng.integers(1, width + 1, (num_rows, 1))
    columns = np.arange(width)
    batch["token_mask"] = (columns >= starts) & (columns < ends)
    batch["sample_mask"] = rng.random(num_rows) > 0.2
    batch["valid"] = batch["token_mask"] & batch["sample_mask"][:, None]
    return batch


def inputs_of(batch: dict[str, np.ndarray], dtype: torch.dtype = torch.float64) -> LossInputs:
    arrays = {name: torch.tensor(batch[name], dtype=dtype) for name in TOKEN_ARRAYS}
    return LossInputs(
        current_logprobs=arrays["curr"].requires_grad_(),
        old_logprobs=arrays["prev"],
        generation_logprobs=arrays["gen"],
        reference_logprobs=arrays["ref"],
        advantages=arrays["adv"],
        entropy=arrays["entropy"],
        token_mask=torch.tensor(batch["token_mask"]),
        sample_mask=torch.tensor(batch["sample_mask"]),
        segment_ids=torch.tensor(batch["segment_ids"]) if "segment_ids" in batch else None,
    )


def normalizer_of(batch: dict[str, np.ndarray]) -> Normalizer:
    return Normalizer(num_tokens=int(batch["valid"].sum()), num_sequences=int(batch["valid"].any(1).sum()))


def take(batch: dict[str, np.ndarray], rows) -> dict[str, np.ndarray]:
    return {name: array[rows] for name, array in batch.items()}


_TRUNCATIONS = (
    {},
    {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.2},
    {
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 2.0,
        "truncated_importance_sampling_ratio_min": 0.6,
    },
    {
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.2,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
)
_POLICY_TERMS = ({}, {"ratio_clip_c": 1.5}, {"use_cispo": True}, {"ratio_clip_min": 0.05, "ratio_clip_max": 0.28})
_LEVELS = [
    {"ratio_level": ratio, "is_level": weight, "token_level_loss": token_level}
    for ratio, weight, token_level in product(("token", "sequence"), ("token", "sequence"), (True, False))
]
_KLS = [{"reference_policy_kl_type": kind, "reference_policy_kl_penalty": 0.1} for kind in ("k1", "k2", "k3")]
_KLS.append({"kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.05, "reference_policy_kl_penalty": 0.1})

configs = st.builds(
    lambda *options: LossConfig(
        use_importance_sampling_correction=True, **{k: v for o in options for k, v in o.items()}
    ),
    st.sampled_from(_TRUNCATIONS),
    st.sampled_from(_POLICY_TERMS),
    st.sampled_from(_LEVELS),
    st.sampled_from(_KLS),
    st.sampled_from(({}, {"entropy_coef": 0.01})),
)
batches = st.builds(random_batch, st.integers(0, 10**6))
