"""Each part killed once. Prints the seconds from the kill to the exit."""

import pytest

from tests.ray.test_faults import kill_and_expect_its_name

PARTS = ["collector", "replay buffer", "policy worker 0", "generation worker 0", "reward worker sort_digits/0"]


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part_ends_the_run_by_name(tmp_path, part, capsys):
    seconds = kill_and_expect_its_name(tmp_path, part)
    with capsys.disabled():
        print(f"\n{part}: the run ended {seconds:.1f} s after the kill")
