"""`replay_buffer.pt`: exact round trip, nothing but plain data in the file, and every damage refused by name."""

import dataclasses
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.errors import CheckpointError
from megatron_grpo.replay.storage import SavedBuffer, load_buffer, save_buffer
from megatron_grpo.types import Problem, Prompt, Trajectory, TrajectoryGroup


def trajectory(rng, reward=0.5, masked_because=None, finish="stop"):
    prompt, generated = 3, int(rng.integers(0, 6))
    num = prompt + generated
    return Trajectory(
        token_ids=rng.integers(0, 99, num).astype(np.int32),
        loss_mask=np.arange(num) >= prompt,
        generation_logprobs=rng.normal(size=num).astype(np.float32),
        token_versions=np.where(np.arange(num) >= prompt, 4, -1).astype(np.int32),
        reward=reward,
        finish_reason=finish,
        masked_because=masked_because,
    )


def group(ordinal, version, target, *, size=2, metadata=None):
    rng = np.random.default_rng(ordinal)
    problem = Problem(question=f"question {ordinal} \u00e9\U0001f600", answer=str(ordinal), metadata=metadata or {})
    return TrajectoryGroup(
        ordinal=ordinal,
        prompt=Prompt(ordinal=ordinal, token_ids=(1, 2, ordinal), env_name="fake", problem=problem),
        trajectories=tuple(
            trajectory(rng, reward=k / 3, masked_because="reward" if k == 1 else None, finish=["stop", "length"][k % 2])
            for k in range(size)
        ),
        generation_version=version,
        target_step=target,
    )


GROUPS = (group(7, 4, 5), group(3, 4, 4, size=3), group(9, 3, 5, metadata={"range": (1, 2), "deep": {"$x": [None]}}))


def saved(path, groups=GROUPS, **changes):
    save_buffer(path, SavedBuffer(groups=groups, last_sampled=3, max_size=8, **changes))
    return path


def assert_same(got, expected):
    assert got.ordinal == expected.ordinal and got.prompt == expected.prompt
    assert (got.generation_version, got.target_step) == (expected.generation_version, expected.target_step)
    assert len(got.trajectories) == len(expected.trajectories)
    for one, other in zip(got.trajectories, expected.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "generation_logprobs", "token_versions"):
            array = getattr(other, name)
            np.testing.assert_array_equal(getattr(one, name), array)
            assert getattr(one, name).dtype == array.dtype
        assert (one.reward, one.finish_reason, one.masked_because) == (
            other.reward,
            other.finish_reason,
            other.masked_because,
        )


def test_what_was_saved_comes_back_in_file_order(tmp_path):
    loaded = load_buffer(saved(tmp_path / "replay_buffer.pt"))
    assert (loaded.last_sampled, loaded.max_size, loaded.has_ordinals) == (3, 8, True)
    for got, expected in zip(loaded.groups, GROUPS, strict=True):
        assert_same(got, expected)


def test_an_empty_buffer_comes_back_empty(tmp_path):
    assert load_buffer(saved(tmp_path / "replay_buffer.pt", groups=())).groups == ()


def test_the_file_has_the_columnar_keys_and_only_plain_data(tmp_path):
    record = torch.load(saved(tmp_path / "replay_buffer.pt"), weights_only=True)
    assert set(record) == {
        "trajectories",
        "trajectory_versions",
        "target_weight_versions",
        "ordinals",
        "last_target_weight_already_generated",
        "max_size",
        "format_version",
    }
    assert record["trajectory_versions"] == [4, 4, 3] and record["target_weight_versions"] == [5, 4, 5]
    assert record["ordinals"] == [7, 3, 9]


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3, ()])),
        {1: "a", (2, 3): None, "x": True},
        {"$tuple": [1]},
        {"$pairs": {}, "y": {"$z": 1.5}},
        [float("inf"), -0.0, 10**30, "\u2028\x00"],
    ],
)
def test_metadata_that_json_does_not_know_comes_back_exactly(tmp_path, value):
    loaded = load_buffer(saved(tmp_path / "replay_buffer.pt", groups=[group(1, 0, 0, metadata={"it": value})]))
    got = loaded.groups[0].prompt.problem.metadata["it"]
    assert got == value and repr(got) == repr(value)


def test_arrays_of_other_types_or_strides_are_saved_as_declared(tmp_path):
    odd = dataclasses.replace(
        GROUPS[0].trajectories[0],
        token_ids=np.arange(12, dtype=np.int64)[::2],
        **{
            name: np.zeros(6, dtype)
            for name, dtype in (("loss_mask", bool), ("generation_logprobs", np.float64), ("token_versions", np.int64))
        },
    )
    path = saved(tmp_path / "replay_buffer.pt", groups=[dataclasses.replace(GROUPS[0], trajectories=(odd,))])
    (row,) = load_buffer(path).groups[0].trajectories
    assert row.token_ids.tolist() == [0, 2, 4, 6, 8, 10] and row.token_ids.dtype == np.int32
    assert row.generation_logprobs.dtype == np.float32


@pytest.mark.parametrize("name", ["spell_backward", "chain_sum", "countdown", "simple_equations", "sokoban"])
def test_entries_of_the_verifier_library_come_back_exactly(tmp_path, name):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entries = list(reasoning_gym.create_dataset(name, size=5, seed=1))
    groups = [group(n, 0, 0, metadata={"entry": entry}) for n, entry in enumerate(entries)]
    loaded = load_buffer(saved(tmp_path / "replay_buffer.pt", groups=groups))
    assert [one.prompt.problem.metadata["entry"] for one in loaded.groups] == entries


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"entry": {"points": [1, {2, 3}]}}, r"prompt 5: metadata\['entry'\]\['points'\]\[1\] is a set"),
        ({"when": np.float32(1)}, r"prompt 5: metadata\['when'\] is a float32"),
        ({3: "x"}, r"prompt 5: the metadata keys \[3\]"),
    ],
)
def test_what_json_cannot_give_back_is_refused_at_save_by_its_key(tmp_path, metadata, named):
    with pytest.raises(CheckpointError, match=named):
        saved(tmp_path / "replay_buffer.pt", groups=[group(5, 0, 0, metadata=metadata)])


def test_a_full_disk_is_an_os_error_so_that_the_directory_can_say_what_to_do():
    with pytest.raises(OSError, match="No space left"):
        saved(Path("/dev/full"))


def test_a_buffer_without_ordinals_loads_with_stand_ins_below_zero(tmp_path):
    loaded = load_buffer(saved(tmp_path / "replay_buffer.pt", has_ordinals=False))
    assert not loaded.has_ordinals
    assert [one.ordinal for one in loaded.groups] == [one.prompt.ordinal for one in loaded.groups] == [-1, -2, -3]


# Damage


def doctored(path, change):
    record = torch.load(saved(path), weights_only=True)
    change(record)
    torch.save(record, path)
    return path


@pytest.mark.parametrize(
    "key",
    [
        "trajectories",
        "trajectory_versions",
        "target_weight_versions",
        "last_target_weight_already_generated",
        "max_size",
        "format_version",
    ],
)
def test_a_missing_key_is_named_with_the_file(tmp_path, key):
    path = doctored(tmp_path / "replay_buffer.pt", lambda record: record.pop(key))
    with pytest.raises(CheckpointError, match=f"{path}.*the key {key} is missing"):
        load_buffer(path)


def cut_targets(record):
    record["target_weight_versions"] = record["target_weight_versions"][:2]


def cut_column(name):
    def change(record):
        record["trajectories"][name] = record["trajectories"][name][:-1]

    return change


def put(*keys, value):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cut_targets, "trajectories 3, trajectory_versions 3, target_weight_versions 2, ordinals 3"),
        (put("ordinals", value=[7, 3]), "trajectories 3, .*ordinals 2"),
        (put("ordinals", value=[7, 3, 7]), "prompt 7 is in it twice"),
        (put("ordinals", value=[7, 3, "9"]), "ordinals is not a list of whole numbers"),
        (put("trajectories", value=[1, 2, 3]), "trajectories is a list, not a table"),
        (put("max_size", value="8"), "max_size is not a whole number"),
        (put("format_version", value=2), "format version 2; this release reads version 1"),
        (put("surprise", value=1), "the key 'surprise' is unknown"),
        (cut_column("token_ids"), "lengths adds up to"),
        (cut_column("rewards"), "rewards has 6 entries instead of 7"),
        (cut_column("group_sizes"), "differ in length: trajectories 2, trajectory_versions 3"),
        (cut_column("problems"), "problems has 2 entries instead of 3"),
        (put("trajectories", "problems", value=["{}"] * 3), r"not the JSON text of \[question, answer, metadata\]"),
        (put("trajectories", "problems", value=[1, 2, 3]), "problems is not a list of strings"),
        (put("trajectories", "words", value=[]), "finish_reasons points outside of words"),
        (put("trajectories", "words", value=["end", "length", "reward"] * 3), "neither stop nor length"),
        (put("trajectories", "lengths", value=torch.tensor([-1, 9])), "lengths holds a negative length"),
        (put("trajectories", "token_ids", value=torch.zeros(3)), "token_ids is not a one-dimensional tensor of"),
        (put("trajectories", "rewards", value=torch.full((7,), float("nan"), dtype=torch.float64)), "not finite"),
    ],
)
def test_what_does_not_fit_together_is_named_with_the_file(tmp_path, change, named):
    path = doctored(tmp_path / "replay_buffer.pt", change)
    with pytest.raises(CheckpointError, match=f"(?s){path}.*{named}"):
        load_buffer(path)


TRACE = Path(tempfile.gettempdir()) / f"loading_ran_code_{os.getpid()}"


class Evil:
    def __reduce__(self):
        return (os.mkdir, (str(TRACE),))


def write_truncated(path):
    data = saved(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])


def write_pickled_object(path):
    doctored(path, put("max_size", value=Evil()))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), r"is empty \(0 bytes\)"),
        (lambda path: path.write_text("not a checkpoint at all"), "foreign"),
        (lambda path: path.write_bytes(os.urandom(4096)), "foreign"),
        (lambda path: path.write_bytes(pickle.dumps({"a": Evil()})), "foreign"),
        (lambda path: torch.save([1, 2], path), "holds a list, not a replay buffer"),
        (lambda path: torch.save({"weights": torch.zeros(2)}, path), "the key trajectories is missing"),
        (write_truncated, "truncated"),
        (write_pickled_object, "holds objects that are never loaded"),
    ],
)
def test_truncated_foreign_and_doctored_files_are_refused_by_name(tmp_path, write, named):
    path = tmp_path / "replay_buffer.pt"
    write(path)
    with pytest.raises(CheckpointError, match=f"(?s){path}.*{named}"):
        load_buffer(path)
    assert not TRACE.exists()
