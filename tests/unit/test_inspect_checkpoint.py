import json

import pytest

from megatron_grpo.checkpoint.contents import STREAM_STATE_NAME
from megatron_grpo.checkpoint.directory import CheckpointDirectory
from megatron_grpo.checkpoint.manifest import REPLAY_BUFFER_NAME
from megatron_grpo.data.stream import EpochOrder
from megatron_grpo.data.stream_state import StreamState
from megatron_grpo.errors import CheckpointError
from megatron_grpo.inspect_checkpoint import run_inspect
from megatron_grpo.replay.storage import SavedBuffer, save_buffer
from megatron_grpo.types import FrontierState
from tests.fakes import make_group, make_trajectory


@pytest.fixture
def root(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    groups = tuple(make_group(n, 4, 4 + n % 2, (make_trajectory([4, 4]), make_trajectory([4]))) for n in range(8, 11))
    stream = StreamState(
        order=EpochOrder(num_rows=10, num_served=8, seed=1, shuffle=True),
        cursor=11,
        frontier=FrontierState(cut=7, frontier=8, trained_above_cut=(), dropped_above_cut=()),
        unaligned_because=None,
        rows_digest="",
    )
    for step in (3, 4):
        with directory.writing(step, {"val:accuracy": 0.25}) as path:
            save_buffer(path / REPLAY_BUFFER_NAME, SavedBuffer(groups=groups, last_sampled=step - 1, max_size=8))
            (path / STREAM_STATE_NAME).write_text(stream.to_json())
    return tmp_path


def test_the_latest_checkpoint_of_a_directory_is_shown(root, capsys):
    assert run_inspect(root) == 0
    shown = capsys.readouterr().out
    assert f"{root}/step_4" in shown and "val:accuracy 0.25" in shown
    assert "3 groups (6 trajectories, 9 generated tokens)" in shown and "by step 4: 2, 5: 1" in shown
    assert "a resumed run goes on at 7" in shown


def test_one_checkpoint_as_json(root, capsys):
    run_inspect(root / "step_3", as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 3 and record["buffer"]["groups_of_version"] == {"4": 3}
    assert record["stream"]["frontier"]["cut"] == 7


def test_a_checkpoint_without_its_buffer_is_shown(root, capsys):
    (root / "step_4" / REPLAY_BUFFER_NAME).unlink()
    assert run_inspect(root / "step_4") == 0
    assert "starts with an empty one" in capsys.readouterr().out


def test_damage_and_absence_are_named(root, tmp_path_factory):
    (root / "step_4" / STREAM_STATE_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"{STREAM_STATE_NAME} is missing"):
        run_inspect(root)
    with pytest.raises(CheckpointError, match="is no checkpoint .* and holds none"):
        run_inspect(tmp_path_factory.mktemp("empty"))
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        run_inspect(root / "step_99")
