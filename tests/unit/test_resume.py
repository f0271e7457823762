"""What a run that starts again finds, and when it refuses to go on with it."""

import json

import pytest

from megatron_grpo.checkpoint.contents import STREAM_STATE_NAME, TRAINING_NAME, TrainingRecord
from megatron_grpo.checkpoint.directory import CheckpointDirectory
from megatron_grpo.checkpoint.manifest import REPLAY_BUFFER_NAME
from megatron_grpo.config.derived import must_save_by_s
from megatron_grpo.data.stream import EpochOrder, PromptRow
from megatron_grpo.data.stream_state import StreamState, resume_point, rows_digest
from megatron_grpo.errors import CheckpointError, ConfigError
from megatron_grpo.resume import find_resume
from megatron_grpo.types import FrontierState, LiveCursor, Problem
from tests.unit.config.recipes import recipe

ROWS = [PromptRow(token_ids=(n,), env_name="fake", problem=Problem(question=f"{n}", answer="")) for n in range(10)]
STATE = StreamState(
    order=EpochOrder(num_rows=10, num_served=8, seed=1, shuffle=True),
    cursor=6,
    frontier=FrontierState(cut=4, frontier=4, trained_above_cut=(), dropped_above_cut=()),
    unaligned_because=None,
    rows_digest=rows_digest(ROWS),
)
LEGACY = StreamState(
    order=STATE.order, cursor=6, frontier=None, unaligned_because=None, rows_digest=STATE.rows_digest
)
RECORD = TrainingRecord(step=2, num_steps=9, num_prompts_per_step=2, num_generations_per_prompt=4, versions={})


def saved(folder, state=STATE):
    directory = CheckpointDirectory(folder)
    directory.prepare()
    with directory.writing(2) as path:
        (path / STREAM_STATE_NAME).write_text(state.to_json())
        (path / TRAINING_NAME).write_text(RECORD.to_json())
        (path / REPLAY_BUFFER_NAME).write_text("not read here")
    return directory


def test_an_empty_directory_is_a_fresh_run(tmp_path):
    assert find_resume(recipe(), ROWS, CheckpointDirectory(tmp_path)) is None


def test_the_latest_checkpoint_is_found_with_its_buffer(tmp_path):
    resume = find_resume(recipe(), ROWS, saved(tmp_path))
    assert (resume.step, resume.path, resume.stream) == (2, tmp_path / "step_2", STATE)
    assert resume.buffer_path == tmp_path / "step_2" / REPLAY_BUFFER_NAME
    assert resume.buffer_found(has_ordinals=True) == "with_ordinals"
    assert resume.buffer_found(has_ordinals=False) == "without_ordinals"


def test_a_buffer_that_is_absent_or_not_wanted_starts_empty(tmp_path):
    directory = saved(tmp_path)
    unwanted = find_resume(recipe({"checkpointing.load_replay_buffer": False}), ROWS, directory)
    (tmp_path / "step_2" / REPLAY_BUFFER_NAME).unlink()
    absent = find_resume(recipe(), ROWS, directory)
    assert unwanted.buffer_path is None and unwanted.buffer_found(has_ordinals=None) == "not_loaded"
    assert absent.buffer_path is None and absent.buffer_found(has_ordinals=None) == "absent"


def test_a_checkpoint_without_alignment_goes_on_at_its_cursor(tmp_path):
    resume = find_resume(recipe(), ROWS, saved(tmp_path, LEGACY))
    point = resume_point(resume.stream, resume.buffer_found(has_ordinals=False), "")
    assert isinstance(point, LiveCursor) and point.position == 6


def test_other_data_is_refused_with_both_numbers(tmp_path):
    directory = saved(tmp_path)
    with pytest.raises(ConfigError, match="6 usable rows, the run started with 10"):
        find_resume(recipe(), ROWS[:6], directory)
    with pytest.raises(ConfigError, match="other ones"):
        find_resume(recipe(), ROWS[::-1], directory)


def test_groups_of_another_size_are_refused_unless_the_buffer_is_left_alone(tmp_path):
    directory, eight = saved(tmp_path), {"grpo.num_generations_per_prompt": 8}
    with pytest.raises(ConfigError, match=r"groups of 4 answers.*load_replay_buffer=false"):
        find_resume(recipe(eight), ROWS, directory)
    assert find_resume(recipe(eight, {"checkpointing.load_replay_buffer": False}), ROWS, directory).step == 2


def test_a_damaged_checkpoint_is_an_error_and_not_an_older_one(tmp_path):
    directory = saved(tmp_path)
    path = tmp_path / "step_2" / STREAM_STATE_NAME
    path.write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=STREAM_STATE_NAME):
        find_resume(recipe(), ROWS, directory)


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("00:03:55:10", 14110.0), ("01:00:00:00", 86400.0)])
def test_the_deadline_of_a_job_in_seconds(text, seconds):
    assert must_save_by_s(recipe({"checkpointing.checkpoint_must_save_by": text})) == seconds
