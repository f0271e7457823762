import pytest

from megatron_grpo.replay.reservations import Reservations


def reservations(*, prompts=2, max_age=1, num_steps=100, start_version=0, buffered=None):
    return Reservations(
        num_prompts_per_step=prompts,
        max_age=max_age,
        num_steps=num_steps,
        start_version=start_version,
        buffered=buffered or {},
    )


def fill(reserved, ordinals):
    """The targets that the ordinals get."""
    targets = []
    for ordinal in ordinals:
        targets.append(reserved.lowest_short_target())
        reserved.reserve(ordinal, targets[-1])
    return targets


def test_the_nearest_short_target_is_filled_first():
    reserved = reservations()
    assert fill(reserved, range(4)) == [0, 0, 1, 1]
    assert reserved.lowest_short_target() is None


def test_a_released_place_is_filled_before_later_targets():
    reserved = reservations()
    fill(reserved, range(3))
    reserved.release(0)
    assert fill(reserved, [3, 4]) == [0, 1]


def test_a_consumed_step_frees_the_next_target_only_with_a_new_version():
    reserved = reservations()
    fill(reserved, range(4))
    reserved.consume(0, [0, 1])
    assert (reserved.num_in_flight, reserved.lowest_short_target()) == (2, None)
    reserved.set_version(1)
    assert reserved.lowest_short_target() == 2


def test_restored_groups_leave_only_the_gap():
    reserved = reservations(start_version=5, buffered={7: 5, 9: 6})
    assert fill(reserved, [10, 11]) == [5, 6]
    assert reserved.lowest_short_target() is None


def test_release_after_the_step_was_sampled_does_nothing():
    reserved = reservations()
    fill(reserved, range(2))
    reserved.consume(0, [0, 1])
    reserved.release(0)
    assert reserved.num_in_flight == 0


def test_without_prompts_left_only_the_last_step_falls_short():
    reserved = reservations(prompts=2, max_age=2)
    fill(reserved, range(6))
    reserved.release(0)
    reserved.close_ranks()
    assert reserved.lowest_short_target() == 2
    reserved.release(5)
    reserved.close_ranks()
    assert (reserved.lowest_short_target(), reserved.num_in_flight) == (2, 4)


def test_a_version_never_goes_back():
    reserved = reservations(start_version=3)
    with pytest.raises(AssertionError, match="went back from 3 to 2"):
        reserved.set_version(2)
