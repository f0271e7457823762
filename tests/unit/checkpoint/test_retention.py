import math

import pytest

from megatron_grpo.checkpoint.retention import Retention, SavedStep


def keep(values, *, k=2, higher=True, period=10):
    saved = [SavedStep(step=step, metric=value) for step, value in values.items()]
    retention = Retention(keep_top_k=k, metric_name="m", higher_is_better=higher, save_period=period)
    return sorted(retention.steps_to_keep(saved))


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, []),
        ({10: 0.1}, [10]),
        ({10: 0.9, 20: 0.5, 30: 0.7, 40: 0.1}, [10, 30, 40]),
        ({10: 0.5, 20: 0.5, 30: 0.5, 40: 0.1}, [20, 30, 40]),  # ties: the newer
        ({10: 0.1, 15: 0.9, 20: 0.2, 23: 0.9}, [10, 20, 23]),  # between periods: only the latest
        ({10: None, 20: math.nan, 30: 0.0, 40: None}, [30, 40]),
        ({10: None, 20: None, 30: None}, [20, 30]),
        ({9: 0.1, 10: 0.1, 100: 0.1}, [10, 100]),  # numbers, not text
    ],
)
def test_the_best_aligned_and_the_latest_stay(values, kept):
    assert keep(values) == kept


def test_lower_can_be_better():
    assert keep({10: 0.9, 20: 0.5, 30: 0.7}, k=1, higher=False) == [20, 30]


def test_everything_stays_without_a_limit():
    assert keep({10: 0.9, 13: 0.5, 30: 0.7}, k=None) == [10, 13, 30]
