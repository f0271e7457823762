"""`verify` over real and made-up ledgers, and the exactness of resumes: simulated runs that it must find faultless."""

import dataclasses
import json
import os

import pytest

from megatron_grpo.data.ledger import Ledger
from megatron_grpo.data.segment import RunStart, Segment
from megatron_grpo.errors import CheckpointError
from megatron_grpo.types import DroppedPrompt
from megatron_grpo.verify import format_verdict, judge, run_verify, verify
from tests.unit import resuming
from tests.unit.resuming import Schedule, Stall


def start(attempt=1, step=0, cut=0, held=(), rows=100, served=100):
    return RunStart(attempt=attempt, start_step=step, cut=cut, held=tuple(held), num_rows=rows, num_served=served)


def segment(run=None, *, out=(), trained=(), steps=(), dropped=(), saved=None):
    return Segment(
        start=run,
        handed_out=list(out),
        trained=list(trained),
        steps=list(steps),
        dropped=[DroppedPrompt(ordinal=ordinal, reason="zero_variance") for ordinal in dropped],
        saved_step=saved,
    )


def test_a_plain_run_trained_every_prompt_once():
    verdict = judge([segment(start(), out=range(6), trained=range(4), steps=[0, 1])])
    assert (verdict.num_trained, verdict.num_pending, verdict.skipped, verdict.repeated) == (4, 2, (), ())
    assert verdict.exit_code == 0


def test_a_prompt_that_was_never_handed_out_is_skipped():
    verdict = judge([segment(start(), out=[0, 1, 3], trained=[0, 1, 3], steps=[0])])
    assert verdict.skipped == (2,) and verdict.exit_code == 1


def test_a_prompt_that_was_in_flight_at_the_save_and_never_came_again_is_skipped():
    before = segment(start(), out=range(8), trained=[0, 1, 2, 3], steps=[0], saved=1)
    lost = judge([before, segment(start(2, 1, cut=8, held=[6, 7]), out=[8, 9], trained=[6, 7, 8, 9], steps=[1])])
    assert lost.skipped == (4, 5) and lost.exit_code == 1
    kept = judge([before, segment(start(2, 1, cut=4, held=[6, 7]), out=[4, 5], trained=[4, 5, 6, 7], steps=[1])])
    assert kept.skipped == () and kept.exit_code == 0


def test_what_came_after_the_save_is_void_and_not_repeated():
    verdict = judge(
        [
            segment(start(), out=range(4), trained=[0, 1], steps=[0], saved=1),
            segment(out=[4, 5], trained=[2, 3, 4, 5], steps=[1, 2], dropped=[9]),
            segment(start(2, 1, cut=2), out=[2, 3, 4, 5, 6], trained=[2, 3, 4, 5], steps=[1, 2]),
        ]
    )
    assert verdict.exit_code == 0 and verdict.num_void_steps == 2 and verdict.num_steps == 3
    assert verdict.dropped == {} and verdict.num_attempts == 2


def test_a_start_from_scratch_makes_everything_before_it_void():
    verdict = judge(
        [segment(start(), out=[0, 1], trained=[0, 1], steps=[0]), segment(start(2), out=[0], trained=[0], steps=[0])]
    )
    assert verdict.exit_code == 0 and verdict.num_trained == 1


def test_a_prompt_trained_in_two_runs_that_both_count_is_repeated():
    verdict = judge(
        [
            segment(start(), out=range(4), trained=[0, 1], steps=[0], saved=1),
            segment(start(2, 1, cut=1), out=[1, 2], trained=[1, 2], steps=[1]),
        ]
    )
    assert verdict.repeated == (1,) and verdict.exit_code == 1


def test_a_dropped_prompt_is_listed_and_must_not_be_trained():
    listed = judge([segment(start(), out=range(3), trained=[0, 2], steps=[0], dropped=[1])])
    assert listed.dropped == {"zero_variance": (1,)} and listed.exit_code == 0
    both = judge([segment(start(), out=range(3), trained=[0, 1, 2], steps=[0], dropped=[1])])
    assert both.repeated == (1,) and both.exit_code == 1


def test_rows_that_no_batch_takes_are_not_skipped():
    verdict = judge([segment(start(rows=5, served=4), out=[0, 1, 2, 3, 5], trained=[0, 1, 2, 3], steps=[0])])
    assert verdict.skipped == ()


def test_a_step_that_is_missing_and_a_save_that_is_unknown_are_problems():
    assert judge([segment(start(), out=[0, 1], trained=[0, 1], steps=[0, 2])]).problems == (
        "step 2 was trained after step 0",
    )
    unknown = judge([segment(start(1, 8, cut=16), out=[16], trained=[16], steps=[8])])
    assert "resumed from step 8, of which the ledger knows no save" in unknown.problems[0]
    assert unknown.exit_code == 1 and unknown.skipped == ()


def test_a_run_without_alignment_loses_what_was_in_flight_and_says_so():
    before = segment(start(), out=range(6), trained=[0, 1], steps=[0], saved=1)
    run = dataclasses.replace(start(2, 1, cut=6, held=[-1, -2]), unaligned_because="no frontier")
    verdict = judge([before, segment(run, out=[6, 7], trained=[-1, -2], steps=[1])])
    assert verdict.problems == ("run 2 resumed without data alignment: no frontier",)
    assert verdict.skipped == (2, 3, 4, 5) and verdict.num_trained == 2 and verdict.exit_code == 1


def test_the_command_prints_the_verdict_and_returns_its_code(tmp_path, capsys):
    ledger = Ledger(tmp_path / "ledger")
    ledger.run_started(start(), {})
    for ordinal in (0, 1, 2, 4):
        ledger.handed_out(ordinal)
    ledger.dropped(1, "generation_failed")
    ledger.trained(0, [0, 4])
    ledger.close()
    assert run_verify(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "skipped        1 3\n" in shown and "dropped        1 generation_failed: 1\n" in shown
    assert shown.endswith("exactly once: NO\n")
    assert run_verify(tmp_path, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["skipped"] == [3]


def test_a_directory_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no run with a ledger"):
        verify(tmp_path)


# Simulated runs


@pytest.fixture
def no_disk(monkeypatch):
    """Thousands of saves; that they wait for the disk is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def simulate(seed, folder, rules=None):
    schedule = Schedule(seed=seed, folder=folder, rules=rules or resuming.Rules())
    schedule.run()
    verdict = verify(folder)
    assert verdict.exit_code == 0, format_verdict(verdict)
    assert verdict.num_steps == schedule.num_steps and verdict.num_attempts == schedule.started
    assert verdict.oldest_age is not None and 0 <= verdict.oldest_age <= 4
    return schedule


def test_no_prompt_is_skipped_or_repeated_whenever_a_run_saves_crashes_and_resumes(tmp_path, no_disk):
    schedules = [simulate(seed, tmp_path / str(seed)) for seed in range(100)]
    # The schedules are worth something only if they do all that.
    assert sum(schedule.num_saves for schedule in schedules) > 100
    assert sum(schedule.started for schedule in schedules) > 200
    assert sum(schedule.num_restored_groups for schedule in schedules) > 50


@pytest.mark.parametrize(
    "rules",
    [
        resuming.FrontierInsteadOfCut,
        resuming.HeldAdvancesNext,
        resuming.ForgetTrainedAboveCut,
        resuming.ForgetDroppedAboveCut,
        resuming.HandOutHeldAgain,
        resuming.WatermarkOfTheBuffer,
        resuming.KeepTooOld,
    ],
)
def test_without_one_of_the_rules_the_simulation_fails(tmp_path, rules, no_disk):
    failed = set()
    for seed in range(60):
        try:
            simulate(seed, tmp_path / str(seed), rules())
        except (AssertionError, Stall, ValueError) as error:
            failed.add(type(error).__name__)
            break
    assert failed
