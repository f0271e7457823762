"""What a person sees: plain lines, the live block, the closing summary, and the reporter that feeds them."""

import io
import json
import logging
import math
import sys

import numpy as np
import pytest
from rich.console import Console

from megatron_grpo.metrics import MetricsWriter, Stopwatch
from megatron_grpo.report.console import log_through, open_console
from megatron_grpo.report.progress import (
    LineDisplay,
    LiveDisplay,
    StepFacts,
    format_facts,
    format_seconds,
    format_step,
    open_display,
)
from megatron_grpo.report.reporter import RunReporter
from megatron_grpo.report.summary import RunHistory, format_summary
from megatron_grpo.types import (
    Collected,
    Problem,
    Prompt,
    Sampled,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
    ValidationResult,
)
from tests.fakes import score_alike

FACTS = StepFacts(
    num_finished_steps=7,
    num_steps=120,
    reward=0.5123,
    loss=-0.0042,
    age=0.75,
    tokens_per_s=1234.4,
    waited_s=0.31,
    left_s=125.0,
)


def test_a_step_is_one_line_with_every_fact():
    line = "step   7/120  reward 0.512  loss -0.0042  age 0.75  1,234 tok/s  waited 0.3 s  left 2m05s"
    assert format_step(FACTS) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (86399.7, "1d00h"),
        (86400 * 2 + 3600 * 4, "2d04h"),
        (-1e-9, "0.0 s"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_seconds_are_written_for_people(seconds, text):
    assert format_seconds(seconds) == text


def test_lines_are_neither_wrapped_nor_interpreted_when_the_output_is_a_file():
    out = io.StringIO()
    with open_display(open_console(out)) as display:
        assert isinstance(display, LineDisplay)
        display.phase("starting [bold]Ray[/bold] :smile: " + "x" * 200)
        display.step(FACTS)
        display.note("held-out exact 41.0%")
    assert out.getvalue().splitlines() == [
        "starting [bold]Ray[/bold] :smile: " + "x" * 200,
        format_step(FACTS),
        "held-out exact 41.0%",
    ]


def terminal(width=200):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_terminal_shows_the_same_facts_as_the_line():
    console = terminal()
    with LiveDisplay(console) as display:
        display.step(FACTS)
    assert format_facts(FACTS) in console.file.getvalue()


def test_a_narrow_terminal_wraps_the_facts_on_lines_of_their_own():
    console = terminal(width=60)
    with LiveDisplay(console) as display:
        display.step(FACTS)
    shown = console.file.getvalue()
    assert format_step(FACTS).split() == shown[shown.rindex("step   7/120") :].partition("since")[0].split()
    assert shown[: shown.rindex("step   7/120")].endswith("\n")


def test_log_records_and_foreign_prints_stay_whole_lines_above_the_live_block(restored_logging):
    console = terminal()
    log_through(console)
    with LiveDisplay(console) as display:
        display.step(FACTS)
        logging.getLogger("megatron_grpo.loop").info("weights of version 3 published")
        print("a library prints")
        sys.stderr.write("a library warns\n")
        display.note("held-out exact 41.0%")
    lines = [line.rstrip() for line in console.file.getvalue().replace("\r", "\n").splitlines()]
    assert any(line.endswith("INFO megatron_grpo.loop: weights of version 3 published") for line in lines)
    for text in ("a library prints", "a library warns", "held-out exact 41.0%"):
        assert any(line.endswith(text) for line in lines), text
    last_block = console.file.getvalue().rpartition("held-out exact 41.0%")[2]
    assert format_step(FACTS) in last_block


def test_the_live_block_says_what_the_run_is_busy_with_and_for_how_long():
    console = terminal()
    now = [10.0]
    with LiveDisplay(console, now=lambda: now[0]) as display:
        display.phase("starting Ray")
        now[0] = 52.0
    assert "starting Ray: 42 s" in console.file.getvalue()


def test_log_records_go_to_stderr_when_the_output_is_a_file(restored_logging, capsys):
    out = io.StringIO()
    log_through(open_console(out))
    logging.getLogger("x").info("hello")
    assert out.getvalue() == ""
    assert "INFO x: hello" in capsys.readouterr().err


def validation(version, accuracy):
    return ValidationResult(
        version=version, accuracy=accuracy, mean_reward=0.6, num_samples=256, mean_length=4.0, seconds=2.0
    )


def test_the_summary_tells_reward_held_out_time_and_files():
    history = RunHistory(num_steps=20)
    history.rewards += [0.1, 0.3] + [0.5] * 16 + [0.8, 1.0]
    history.validations += [validation(0, 0.41), validation(10, 0.9), validation(20, 0.684)]
    history.spent({"wait_for_groups": 20.0, "train": 60.0})
    history.spent({"train": 15.0, "other": 5.0})
    assert format_summary(history.summary({"metrics": "logs/run/metrics.jsonl"})).splitlines() == [
        "Finished 20 of 20 steps in 1m40s",
        "  reward               0.200 -> 0.900  (means of the first and last 2 steps)",
        "  held-out exact       41.0% -> 68.4% of 256",
        "  time train               75.0 s   75.0%",
        "  time wait for groups     20.0 s   20.0%",
        "  time other                5.0 s    5.0%",
        "  metrics              logs/run/metrics.jsonl",
    ]


def test_the_summary_of_a_run_that_measured_nothing_claims_nothing():
    text = format_summary(RunHistory(num_steps=20, start_step=20).summary({}))
    assert "Finished 20 of 20 steps in 0.0 s" in text
    assert "none measured" in text and "not measured" in text


def test_one_validation_is_no_before_and_after():
    history = RunHistory(num_steps=1)
    history.rewards.append(0.5)
    history.validations.append(validation(1, 0.5))
    text = format_summary(history.summary({}))
    assert "held-out exact       50.0% of 256" in text
    assert "0.500 -> 0.500  (the first and last step)" in text


def test_a_step_without_a_usable_reward_does_not_spoil_the_running_mean():
    history = RunHistory(num_steps=30)
    history.rewards += [9.0, 0.2, math.nan, 0.4]
    assert history.running_reward() == pytest.approx(0.3)


def sampled_group(reward):
    trajectory = Trajectory(
        token_ids=np.zeros(3, np.int32),
        loss_mask=np.array([False, True, True]),
        generation_logprobs=np.zeros(3, np.float32),
        token_versions=np.array([-1, 0, 0], np.int32),
        reward=reward,
        finish_reason="stop",
    )
    prompt = Prompt(ordinal=0, token_ids=(1,), env_name="e", problem=Problem(question="q", answer="a"))
    group = TrajectoryGroup(
        ordinal=0, prompt=prompt, trajectories=(trajectory,), generation_version=0, target_step=0
    )
    return Sampled(groups=(group,), evicted=(), waited_s=0.5, buffer_size=0)


def report_step(reporter, step, reward, now):
    clock = Stopwatch(lambda: now[0])
    with clock.measure("train"):
        now[0] += 4.0
    trained = TrainResult(metrics={"loss": 0.1}, num_updates=1, learning_rate=1e-3)
    sampled = sampled_group(reward)
    scored = score_alike(sampled.groups)
    collected = Collected(counters={})
    reporter.step(step, sampled=sampled, scored=scored, trained=trained, collected=collected, clock=clock)


def test_the_reporter_writes_one_record_per_step_and_estimates_what_is_left(tmp_path):
    out, now = io.StringIO(), [0.0]
    history = RunHistory(num_steps=4)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        reporter = RunReporter(
            writer=writer,
            display=LineDisplay(open_console(out)),
            history=history,
            validation_due=lambda finished: finished % 2 == 0,
        )
        reporter.validated(0, validation(0, 0.25))
        report_step(reporter, 0, 0.2, now)
        report_step(reporter, 1, 0.4, now)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
        reporter.validated(2, validation(2, 0.5))
        report_step(reporter, 2, 0.6, now)
        report_step(reporter, 3, 0.8, now)
        reporter.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record.get("val:accuracy")) for record in records] == [
        (0, 0.25),
        (1, None),
        (2, 0.5),
        (3, None),
        (4, None),
    ]
    lines = out.getvalue().splitlines()
    assert lines[0] == "held-out exact 25.0% of 256 after step 0, reward 0.600"
    assert lines[1].startswith("step 1/4  reward 0.200") and lines[1].endswith("waited 0.5 s  left 12 s")
    assert lines[4].startswith("step 3/4") and lines[4].endswith("left 4.7 s")  # (3 x 4 s + 2 s) / 3
    assert history.seconds_by_cause == {"other": 0.0, "train": 16.0, "validation": 4.0}
