"""Metric values, the records of a step and the files they go to."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.errors import ConfigError
from megatron_grpo.metrics import (
    Max,
    Mean,
    MetricsWriter,
    StepMetrics,
    Sum,
    group_metrics,
    merge,
    step_metrics,
    to_floats,
)
from megatron_grpo.types import (
    Collected,
    DroppedPrompt,
    Problem,
    Prompt,
    Sampled,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
    ValidationResult,
)
from tests.fakes import score_alike

finite = st.floats(-1e6, 1e6)


@given(st.lists(st.lists(finite, min_size=1), min_size=1))
def test_merged_means_equal_the_mean_of_everything(parts):
    whole = Mean.of(value for part in parts for value in part)
    merged = merge({"m": Mean.of(part)} for part in parts)["m"]
    assert merged.count == whole.count
    assert merged.value == pytest.approx(whole.value, rel=1e-9, abs=1e-6)


def test_means_of_unequal_counts_are_not_averaged_as_equals():
    assert Mean.of([1, 1, 1]).merge(Mean.of([5])).value == 2.0


def test_an_empty_mean_is_nan_and_neutral_in_a_merge():
    assert math.isnan(Mean.of([]).value)
    assert Mean.of([]).merge(Mean.of([3.0])).value == 3.0


def test_merge_keeps_sums_maxima_and_names_that_only_one_part_has():
    merged = merge([{"n": Sum(value=2), "top": Max(value=1)}, {"n": Sum(value=3), "only": Sum(value=7)}])
    assert to_floats(merged) == {"n": 5.0, "top": 1.0, "only": 7.0}


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_nan_is_not_lost_in_a_maximum(order):
    first, second = order
    assert math.isnan(Max(value=first).merge(Max(value=second)).value)


def test_merging_two_kinds_under_one_name_is_refused():
    with pytest.raises(TypeError, match="'x' is a Sum here and a Max there"):
        merge([{"x": Sum(value=1)}, {"x": Max(value=1)}])


def make_trajectory(*, reward=1.0, versions=(3, 3), masked_because=None, finish_reason="stop"):
    length = 2 + len(versions)
    mask = np.array([False, False] + [True] * len(versions))
    return Trajectory(
        token_ids=np.zeros(length, np.int32),
        loss_mask=mask,
        generation_logprobs=np.zeros(length, np.float32),
        token_versions=np.array([-1, -1, *versions], np.int32),
        reward=reward,
        finish_reason=finish_reason,
        masked_because=masked_because,
    )


def make_group(*trajectories, generation_version=3, target_step=4):
    prompt = Prompt(ordinal=0, token_ids=(1, 2), env_name="e", problem=Problem(question="q", answer="a"))
    return TrajectoryGroup(
        ordinal=0,
        prompt=prompt,
        trajectories=trajectories,
        generation_version=generation_version,
        target_step=target_step,
    )


def test_group_metrics_leave_masked_rewards_out_and_count_ages_per_group():
    groups = [
        make_group(
            make_trajectory(reward=1.0, versions=(3, 4)),
            make_trajectory(reward=0.0, masked_because="reward is NaN"),
        ),
        make_group(make_trajectory(reward=0.5, versions=(4,) * 4, finish_reason="length"), generation_version=4),
    ]
    values = to_floats(group_metrics(groups))
    assert values["train/reward"] == pytest.approx(0.75)
    assert (values["train/min_trajectory_age"], values["train/max_trajectory_age"]) == (0, 1)
    assert values["train/avg_trajectory_age"] == 0.5
    assert values["train/mixed_version_fraction"] == pytest.approx(1 / 3)
    assert values["train/truncated_share"] == pytest.approx(1 / 3)
    assert values["train/num_generated_tokens"] == 8


def make_step(step=0, dropped=()):
    groups = (make_group(make_trajectory()),)
    sampled = Sampled(groups=groups, evicted=(7,), waited_s=1.0, buffer_size=5)
    trained = TrainResult(metrics={"loss": 0.25, "gen_kl_error": 1e-7}, num_updates=4, learning_rate=1e-3)
    seconds = {"wait_for_groups": 1.5, "train": 0.5}
    return step_metrics(
        step=step,
        sampled=sampled,
        scored=score_alike(groups),
        trained=trained,
        seconds=seconds,
        collected=Collected(counters={"num_failures": 2.0}, dropped=dropped),
    )


def test_a_step_is_reported_under_the_public_names():
    record = make_step(step=9)
    assert record.num_finished_steps == 10
    expected = {
        "train/loss": 0.25,
        "train/gen_kl_error": 1e-7,
        "train/reward": 1.0,
        "train/avg_trajectory_age": 1.0,
        "train/buffer_size": 5,
        "train/num_evicted_groups": 1,
        "train/learning_rate": 1e-3,
        "timing/train/train": 0.5,
        "timing/train/wait_for_groups": 1.5,
        "timing/train/total_step_time": 2.0,
        "performance/generated_tokens_per_s": 1.0,
        "efficiency/waiting_share": 0.5,
        "collector/num_failures": 2.0,
    }
    assert {name: record.values[name] for name in expected} == expected


def test_dropped_prompts_are_listed_by_ordinal_in_the_record_of_their_step(tmp_path):
    dropped = (DroppedPrompt(ordinal=7, reason="generation_failed"), DroppedPrompt(ordinal=9, reason="zero_variance"))
    with MetricsWriter(tmp_path) as writer:
        writer.write(make_step(step=0, dropped=dropped).with_validation(validation()))
        writer.write(make_step(step=1))
    first, second = read_lines(tmp_path)
    assert first["dropped"] == [
        {"ordinal": 7, "reason": "generation_failed"},
        {"ordinal": 9, "reason": "zero_variance"},
    ]
    assert "dropped" not in second and first["train/loss"] == 0.25


def validation(version=1, accuracy=0.5):
    return ValidationResult(
        version=version, accuracy=accuracy, mean_reward=0.6, num_samples=256, mean_length=4.0, seconds=2.0
    )


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_record_is_readable_as_soon_as_it_is_written_and_carries_the_validation(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(StepMetrics.of_validation(validation(version=0, accuracy=0.25)))
        writer.write(make_step(step=0).with_validation(validation()))
        first, second = read_lines(tmp_path)
    assert (first["step"], first["val:accuracy"]) == (0, 0.25)
    assert (second["step"], second["val:accuracy"], second["train/loss"]) == (1, 0.5, 0.25)


def test_numbers_that_json_lacks_become_null(tmp_path):
    values = {"nan": math.nan, "inf": -math.inf, "np": np.float32(0.5), "count": 3}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(StepMetrics(num_finished_steps=1, values=values))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "nan": None, "inf": None, "np": 0.5, "count": 3}
    assert '"count": 3}' in text


def write_steps(folder, steps, **options):
    with MetricsWriter(folder, **options) as writer:
        for step in steps:
            writer.write(StepMetrics(num_finished_steps=step, values={"train/loss": float(step)}))


def test_a_resumed_run_replaces_the_steps_that_were_lost_and_a_torn_line(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4], tensorboard=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')
    write_steps(tmp_path, [3, 4, 5], start_step=2, tensorboard=False)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_moves_the_file_of_an_earlier_run_aside(tmp_path):
    for first in (10, 20, 30):
        write_steps(tmp_path, [first], tensorboard=False)
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["step"] == 10
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["step"] == 20
    assert [line["step"] for line in read_lines(tmp_path)] == [30]


def test_tensorboard_reads_back_what_was_written_and_forgets_the_lost_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, [1, 2, 3, 4])
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(StepMetrics(num_finished_steps=3, values={"train/loss": 30.0}))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_folder_that_cannot_be_made_is_refused_by_its_key(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="logger.log_dir: .*taken/run cannot be written"):
        MetricsWriter(tmp_path / "taken" / "run")


def test_wandb_asked_for_but_missing_names_the_remedy_and_touches_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_steps(tmp_path, [1], tensorboard=False)
    with pytest.raises(ConfigError, match=r"pip install 'megatron_grpo\[wandb\]'"):
        MetricsWriter(tmp_path, wandb={"project": "p"})
    assert [line["step"] for line in read_lines(tmp_path)] == [1]


def test_wandb_gets_every_record(tmp_path, monkeypatch):
    class FakeWandb:
        def __init__(self):
            self.calls = []

        def init(self, *, project, name, dir):
            self.calls.append(("init", project, name))
            return self

        def log(self, values, step):
            self.calls.append(("log", step, values))

        def finish(self):
            self.calls.append("finish")

    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_steps(tmp_path, [1], tensorboard=False, wandb={"project": "p", "name": "n"})
    assert fake.calls == [("init", "p", "n"), ("log", 1, {"train/loss": 1.0}), "finish"]


def test_neither_torch_nor_tensorflow_is_loaded_to_write_metrics(tmp_path):
    code = (
        "import sys; from megatron_grpo.metrics import MetricsWriter; assert 'tensorboard' not in sys.modules\n"
        f"MetricsWriter({str(tmp_path)!r}).close(); assert 'tensorboard' in sys.modules\n"
        "assert not {'torch', 'tensorflow', 'wandb', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
