"""Options of the objective: what is refused, and how the recipe's section becomes them."""

from types import SimpleNamespace

import pytest

from megatron_grpo.algorithms.loss import LossConfig
from megatron_grpo.errors import ConfigError

SECTION = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": 3.0,
    "use_cispo": False,
    "token_level_loss": True,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k2",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 2.0,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "entropy_coef": 0.004,
}


def test_every_key_of_the_section_arrives():
    config = LossConfig.from_recipe(SimpleNamespace(**SECTION))
    names = [name for name in SECTION if name != "sequence_level_importance_ratios"]
    assert {name: getattr(config, name) for name in names} == {name: SECTION[name] for name in names}
    assert (config.ratio_level, config.is_level) == ("token", "token")


def test_the_sequence_level_key_sets_both_levels():
    config = LossConfig.from_recipe(SimpleNamespace(**SECTION | {"sequence_level_importance_ratios": True}))
    assert (config.ratio_level, config.is_level) == ("sequence", "sequence")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ratio_clip_c": 1.0}, "ratio_clip_c"),
        ({"ratio_clip_c": float("nan")}, "ratio_clip_c"),
        ({"ratio_clip_max": -0.1}, "ratio_clip_max"),
        ({"entropy_coef": float("inf")}, "entropy_coef"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value"),
        ({"truncated_importance_sampling_type": "tis"}, "truncated_importance_sampling_ratio"),
        ({"truncated_importance_sampling_type": "cap"}, "truncated_importance_sampling_type"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_type"),
        ({"truncated_importance_sampling_ratio_min": 0.5}, "truncated_importance_sampling_ratio_min"),
        (
            {
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 1.0,
                "truncated_importance_sampling_ratio_min": 1.5,
            },
            "truncated_importance_sampling_ratio_min",
        ),
    ],
)
def test_refused_naming_the_key(options, named):
    with pytest.raises(ConfigError, match=f"loss_fn.*{named}"):
        LossConfig(**options)


def test_all_problems_are_found_at_once():
    with pytest.raises(ConfigError) as refused:
        LossConfig(ratio_clip_c=0.5, ratio_clip_min=-1, reference_policy_kl_type="k9")
    assert len(refused.value.problems) == 3
