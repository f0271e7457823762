import pytest

from megatron_grpo.replay.staleness import assert_young_enough, can_serve, open_targets
from tests.fakes import make_group, make_trajectory


def test_a_version_serves_its_step_and_max_age_more():
    assert [step for step in range(9, 14) if can_serve(10, step, 1)] == [10, 11]
    assert [step for step in range(9, 14) if can_serve(10, step, 0)] == [10]


def test_the_window_starts_at_version_zero():
    assert can_serve(0, 0, 2) and can_serve(0, 2, 2)
    assert not can_serve(-1, 0, 2)


def test_open_targets_begin_with_the_current_step():
    assert list(open_targets(10, 9, 1, 100)) == [10, 11]
    assert list(open_targets(0, -1, 2, 100)) == [0, 1, 2]


def test_a_sampled_step_is_no_longer_open():
    assert list(open_targets(10, 10, 1, 100)) == [11]


def test_synchronous_training_has_the_window_of_one_step():
    assert list(open_targets(4, 3, 0, 100)) == [4]
    assert list(open_targets(4, 4, 0, 100)) == []


def test_the_window_ends_with_the_run():
    assert list(open_targets(9, 8, 3, 10)) == [9]
    assert list(open_targets(10, 9, 3, 10)) == []


def test_every_group_started_for_an_open_target_can_serve_it():
    for max_age in range(4):
        for version in range(12):
            for target in open_targets(version, version - 1, max_age, 10):
                assert can_serve(version, target, max_age)


def with_tokens(*versions, generation_version=4):
    return make_group(7, generation_version, 9, (make_trajectory([]), make_trajectory(list(versions))))


def test_the_bound_holds_for_the_oldest_token_not_only_for_the_groups_version():
    assert_young_enough(with_tokens(4, 4, 5), 5, 1)
    assert_young_enough(make_group(7, 4, 5), 5, 1)
    for group in (with_tokens(3, 5), with_tokens(5, generation_version=3)):
        with pytest.raises(AssertionError, match=r"prompt 7: .* 3 to 5 cannot serve step 5, the largest age is 1"):
            assert_young_enough(group, 5, 1)


def test_a_token_from_the_future_of_its_step_is_a_bug():
    with pytest.raises(AssertionError, match="4 to 6 cannot serve step 5"):
        assert_young_enough(with_tokens(4, 6), 5, 1)
