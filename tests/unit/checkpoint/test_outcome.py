import pytest

from megatron_grpo.checkpoint.outcome import OUTCOME_NAME, Outcome, clear_outcome, read_outcome, write_outcome
from megatron_grpo.errors import CheckpointError
from tests.unit.checkpoint.crashing import DISK_FULL, CrashingFiles, Killed, RefusingFiles

DEADLINE = Outcome(ending="deadline", step=7, requeue=True, reason="checkpoint_must_save_by")
FINISHED = Outcome(ending="finished", step=9, requeue=False)


def test_the_outcome_of_the_last_run_is_read_back(tmp_path):
    assert read_outcome(tmp_path) is None
    for outcome in (DEADLINE, FINISHED):
        write_outcome(tmp_path, outcome)
        assert read_outcome(tmp_path) == outcome
    clear_outcome(tmp_path)
    clear_outcome(tmp_path)
    assert read_outcome(tmp_path) is None


def test_a_write_killed_at_any_operation_leaves_the_old_or_the_new_outcome(tmp_path):
    write_outcome(tmp_path, DEADLINE)
    for at in range(4):
        with pytest.raises(Killed):
            write_outcome(tmp_path, FINISHED, CrashingFiles(at))
        assert read_outcome(tmp_path) in (DEADLINE, FINISHED)


def test_a_full_disk_is_explained_and_the_old_outcome_stays(tmp_path):
    write_outcome(tmp_path, DEADLINE)
    with pytest.raises(CheckpointError, match="is full"):
        write_outcome(tmp_path, FINISHED, RefusingFiles("sync", DISK_FULL))
    assert read_outcome(tmp_path) == DEADLINE
    assert [path.name for path in tmp_path.iterdir()] == [OUTCOME_NAME]


def test_a_damaged_outcome_is_named(tmp_path):
    (tmp_path / OUTCOME_NAME).write_text("{")
    with pytest.raises(CheckpointError, match=f"{OUTCOME_NAME} is damaged"):
        read_outcome(tmp_path)
