"""A checkpoint is there whole or not at all, whatever stops a save, and damage is named."""

import json
import logging
import shutil

import pytest

from megatron_grpo.checkpoint.directory import CheckpointDirectory
from megatron_grpo.checkpoint.manifest import MANIFEST_NAME
from megatron_grpo.checkpoint.retention import Retention
from megatron_grpo.errors import CheckpointError
from tests.unit.checkpoint.crashing import DISK_FULL, READ_ONLY, CrashingFiles, Killed, RefusingFiles


def content(step):
    return {
        "replay_buffer.pt": f"buffer {step}" * 50,
        "weights/rank_0.distcp": f"w{step}" * 90,
        "info.json": str(step),
        "empty": "",
    }


def fill(path, step):
    for name, text in content(step).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)


def save(directory, step, metrics=None):
    with directory.writing(step, metrics) as path:
        fill(path, step)


def holds(path, step):
    found = {p.relative_to(path).as_posix(): p.read_text() for p in path.rglob("*") if p.is_file()}
    found.pop(MANIFEST_NAME)
    return found == content(step)


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints", num_threads=2)
    directory.prepare()
    return directory


# Appearing whole


def test_a_checkpoint_appears_when_its_block_ends(directory):
    with directory.writing(3, {"val:accuracy": 0.5}) as path:
        fill(path, 3)
        assert path.name == "tmp_step_3" and directory.latest() is None
    assert directory.latest() == 3 and not path.exists()
    assert holds(directory.path(3), 3)
    assert directory.verify(directory.path(3)).metrics == {"val:accuracy": 0.5}


def num_operations(root):
    files = CrashingFiles()
    directory = CheckpointDirectory(root, files=files, num_threads=1)
    directory.prepare()
    save(directory, 20)
    return len(files.done)


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_save_killed_at_any_operation_leaves_the_previous_or_the_new_checkpoint(tmp_path, power_cut):
    count = num_operations(tmp_path / "counted")
    assert count >= 9
    seen = set()
    for at in range(count):
        root = tmp_path / f"{power_cut}{at}"
        first = CrashingFiles()
        before = CheckpointDirectory(root, files=first, num_threads=1)
        before.prepare()
        save(before, 10)
        files = CrashingFiles(at)
        files.synced = first.synced
        with pytest.raises(Killed):
            save(CheckpointDirectory(root, files=files, num_threads=1), 20)
        if power_cut:
            files.cut_power(root)

        after = CheckpointDirectory(root)
        after.prepare()
        assert [path.name for path in root.iterdir() if path.name.startswith("tmp")] == []
        latest = after.latest()
        seen.add(latest)
        after.verify(after.path(latest))
        assert holds(after.path(latest), latest)
        if latest == 10:  # and the save can be made again
            save(after, 20)
            assert after.latest() == 20
    assert seen == {10, 20}


def test_a_removal_killed_at_any_operation_leaves_whole_checkpoints_only(tmp_path):
    keep_one = Retention(keep_top_k=1, metric_name=None, higher_is_better=True, save_period=1)
    for at in range(4):
        root = tmp_path / str(at)
        before = CheckpointDirectory(root)
        before.prepare()
        for step in (1, 2, 3):
            save(before, step)
        with pytest.raises(Killed):
            CheckpointDirectory(root, files=CrashingFiles(at)).retain(keep_one)
        after = CheckpointDirectory(root)
        after.prepare()
        assert after.latest() == 3
        for step in after.steps():
            after.verify(after.path(step))
        assert {path.name for path in root.iterdir()} == {f"step_{step}" for step in after.steps()}


def test_a_save_that_fails_inside_its_block_leaves_nothing(directory):
    save(directory, 1)
    with pytest.raises(ZeroDivisionError), directory.writing(2) as path:
        fill(path, 2)
        raise ZeroDivisionError
    assert sorted(found.name for found in directory.root.iterdir()) == ["step_1"]


def test_a_save_in_two_halves(directory):
    path = directory.begin(4)
    fill(path, 4)
    assert directory.latest() is None
    directory.commit(4)
    assert directory.latest() == 4
    fill(directory.begin(5), 5)
    directory.abandon(5)
    assert directory.latest() == 4 and not (directory.root / "tmp_step_5").exists()


def test_a_checkpoint_is_never_overwritten(directory):
    save(directory, 1)
    with pytest.raises(CheckpointError, match="step_1 exists already"), directory.writing(1):
        raise AssertionError("not reached")
    assert holds(directory.path(1), 1)


# Refusals of the system


OPERATIONS = ["make_directory", "write", "sync", "digest", "rename"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("number", "remedy"), [(DISK_FULL, "disk of .* is full.*make room"), (READ_ONLY, "give this user write access")]
)
def test_a_refusal_says_what_to_do_and_leaves_the_previous_checkpoint(directory, operation, number, remedy):
    save(directory, 10)
    refused = CheckpointDirectory(directory.root, files=RefusingFiles(operation, number))
    with pytest.raises(CheckpointError, match=f"step_20 was not written: .*{remedy}.*step_10 is intact"):
        save(refused, 20)
    assert directory.latest() == 10 and holds(directory.path(10), 10)
    assert sorted(found.name for found in directory.root.iterdir()) == ["step_10"]


def test_a_full_disk_met_by_the_writer_inside_the_block_is_explained_too(directory):
    with (
        pytest.raises(CheckpointError, match="is full.*there is no earlier one"),
        directory.writing(1),
        open("/dev/full", "w") as file,
    ):
        file.write("x" * 100_000)


def test_a_vanished_directory_is_named(directory):
    save(directory, 1)
    shutil.rmtree(directory.root)
    with pytest.raises(CheckpointError, match="has vanished .*start the same command again"):
        save(directory, 2)


def test_a_directory_that_vanishes_during_the_save_is_named(directory):
    with pytest.raises(CheckpointError, match="has vanished"), directory.writing(2) as path:
        fill(path, 2)
        shutil.rmtree(directory.root)


def test_a_root_that_is_a_file_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        CheckpointDirectory(tmp_path / "file").prepare()


# The latest


def test_the_latest_is_the_highest_number_of_complete_directories(directory, caplog):
    for step in (9, 10, 100):
        save(directory, step)
    shutil.copytree(directory.path(100), directory.root / "step_100.bak")
    shutil.copytree(directory.path(100), directory.root / "tmp_step_101")
    shutil.copytree(directory.path(100), directory.root / "step_0103")
    (directory.root / "step_102").mkdir()
    (directory.root / "step_200").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert directory.latest() == 100
    assert "step_102 is empty" in caplog.text
    assert directory.steps() == (9, 10, 100)


def test_a_later_directory_without_its_manifest_is_not_skipped_in_silence(directory):
    save(directory, 1)
    save(directory, 2)
    (directory.path(2) / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"step_2 holds files but no manifest.json.*resume from step_1"):
        directory.latest()


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_save_takes_the_place_of_a_directory_that_is_no_checkpoint(directory, is_empty):
    directory.path(5).mkdir()
    if not is_empty:
        (directory.path(5) / "mine").write_text("keep me")
    save(directory, 5)
    assert directory.latest() == 5
    assert is_empty or (directory.root / "step_5.incomplete1" / "mine").read_text() == "keep me"


def test_no_directory_has_no_latest(tmp_path):
    assert CheckpointDirectory(tmp_path / "nowhere").latest() is None


# Damage


def remove(path):
    (path / "info.json").unlink()


def add(path):
    (path / "stray").write_text("")


def truncate(path):
    (path / "weights/rank_0.distcp").write_text("w")


def change(path):
    file = path / "replay_buffer.pt"
    file.write_bytes(file.read_bytes().replace(b"b", b"c", 1))


def new_format(path):
    file = path / MANIFEST_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 2}))


def spoil_manifest(path):
    (path / MANIFEST_NAME).write_text("{")


def strip_manifest(path):
    (path / MANIFEST_NAME).write_text('{"format_version": 1, "step": 7}')


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove, "step_7 is damaged: info.json is missing"),
        (add, "stray is not part of it"),
        (truncate, r"weights/rank_0.distcp has 1 bytes instead of 180"),
        (change, "replay_buffer.pt has changed"),
        (new_format, "format version 2; this release reads version 1"),
        (spoil_manifest, "manifest.json cannot be read"),
        (strip_manifest, "manifest.json is damaged: KeyError: 'files'"),
    ],
)
def test_damage_is_named(directory, damage, named):
    save(directory, 7)
    damage(directory.path(7))
    with pytest.raises(CheckpointError, match=named):
        directory.verify(directory.path(7))


def test_sizes_alone_are_compared_without_reading(directory):
    save(directory, 7)
    change(directory.path(7))
    directory.verify(directory.path(7), digests=False)


def test_a_renamed_checkpoint_is_refused(directory):
    save(directory, 7)
    directory.path(7).rename(directory.path(9))
    with pytest.raises(CheckpointError, match="step_9 holds the checkpoint of step 7"):
        directory.verify(directory.path(9))


def test_only_the_replay_buffer_may_be_absent(directory, caplog):
    save(directory, 7)
    (directory.path(7) / "replay_buffer.pt").unlink()
    with caplog.at_level(logging.WARNING):
        manifest = directory.verify(directory.path(7))
    assert "replay_buffer.pt" not in manifest.files and "info.json" in manifest.files
    assert "has no replay_buffer.pt: the buffer starts empty" in caplog.text
    assert directory.latest() == 7


# Retention


def test_retention_reads_the_metric_from_the_manifests(directory):
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, float("nan")), (33, 1.0), (40, 0.1)):
        save(directory, step, {"val:accuracy": accuracy})
    best = Retention(keep_top_k=1, metric_name="val:accuracy", higher_is_better=True, save_period=10)
    assert directory.retain(best) == (10, 30, 33)
    assert directory.steps() == (20, 40)


def test_a_checkpoint_that_cannot_be_removed_is_logged(directory, caplog):
    save(directory, 1)
    save(directory, 2)
    stubborn = CheckpointDirectory(directory.root, files=RefusingFiles("rename", READ_ONLY))
    stubborn.retain(Retention(keep_top_k=1, metric_name=None, higher_is_better=True, save_period=1))
    assert "old checkpoint" in caplog.text and directory.steps() == (1, 2)
