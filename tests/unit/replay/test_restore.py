from megatron_grpo.replay.restore import clean_restored
from tests.fakes import make_group


def clean(groups, *, resume_step=5, num_prompts_per_step=2, max_age=1, capacity=8):
    restored = clean_restored(
        groups,
        resume_step=resume_step,
        num_prompts_per_step=num_prompts_per_step,
        max_age=max_age,
        capacity=capacity,
    )
    return [group.ordinal for group in restored.kept], list(restored.dropped)


def test_trained_steps_and_stale_groups_are_dropped_and_incomplete_targets_kept():
    groups = [make_group(0, 3, 4), make_group(1, 4, 5), make_group(2, 3, 5), make_group(3, 5, 6)]
    assert clean(groups) == ([1, 3], [0, 2])


def test_of_an_overfull_target_the_later_groups_are_dropped():
    groups = [make_group(ordinal, 5, 5) for ordinal in range(4)]
    assert clean(groups) == ([0, 1], [2, 3])


def test_stale_groups_do_not_count_against_the_limit_of_a_target():
    groups = [make_group(0, 2, 5), make_group(1, 5, 5), make_group(2, 5, 5)]
    assert clean(groups) == ([1, 2], [0])


def test_capacity_goes_to_the_nearest_targets_and_the_file_order_stays():
    groups = [make_group(0, 5, 6), make_group(1, 5, 5), make_group(2, 5, 6), make_group(3, 5, 5)]
    assert clean(groups, capacity=3) == ([0, 1, 3], [2])


def test_nothing_saved_restores_nothing():
    assert clean([]) == ([], [])
