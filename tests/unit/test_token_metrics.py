"""Ages of tokens, and the error between trainer and engine on tokens of the same weights."""

import numpy as np
import pytest

from megatron_grpo.metrics import fresh_error, group_metrics, to_floats
from tests.fakes import make_group, make_trajectory, score_alike

MASKED = "overlong"


def test_tokens_are_counted_by_age_and_masked_samples_are_not():
    groups = [
        make_group(0, 3, 4, (make_trajectory([3, 4]), make_trajectory([4, 4]))),
        make_group(1, 2, 4, (make_trajectory([2, 2, 2, 4]), make_trajectory([0], masked_because=MASKED))),
    ]
    values = to_floats(group_metrics(groups))
    shares = {name: value for name, value in values.items() if name.startswith("train/token_age_")}
    assert shares == {"train/token_age_0": 4 / 8, "train/token_age_1": 1 / 8, "train/token_age_2": 3 / 8}
    assert values["train/max_token_age"] == 2
    assert values["train/mixed_version_fraction"] == 2 / 4


def test_a_step_without_a_valid_token_has_no_ages():
    values = to_floats(group_metrics([make_group(0, 3, 4, (make_trajectory([3], masked_because=MASKED),))]))
    assert not [name for name in values if "token_age" in name]


def test_the_error_on_fresh_tokens_leaves_older_prompt_padded_and_masked_ones_out():
    made = (make_trajectory([3, 4, 4]), make_trajectory([4]), make_trajectory([4, 4], masked_because=MASKED))
    groups = [make_group(0, 3, 4, made)]
    old = np.full((3, 4), 7.0, np.float32)  # would be seen at once if it counted
    old[0, 2], old[0, 3], old[1, 1] = 0.5, -0.25, 0.0
    errors = fresh_error(groups, score_alike(groups, old), step=4)
    d = np.array([0.5, -0.25, 0.0])
    assert errors["train/gen_kl_error_fresh"].count == 3
    assert errors["train/gen_kl_error_fresh"].value == pytest.approx(np.mean(np.exp(d) - 1 - d))
    assert errors["train/token_mult_prob_error_fresh"].value == pytest.approx(np.mean(np.exp(abs(d))))
    assert fresh_error(groups, score_alike(groups, old), step=9) == {}
