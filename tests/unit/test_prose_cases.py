"""The prose table of known faults (tests/cases/cases.json): every row of groups G1-G5 names what covers it.

`COVERED` points at tests, or at rows of the tables that tests run. `LATER` names, for each row whose feature this
version does not have, the function of config/availability.py that refuses the feature. When the feature arrives the
function is deleted, and this file asks for the row's test. Prose cannot be run: rows of another folder
(MEGATRON_GRPO_CASES) are judged by the other tables of that folder, or skipped.
"""

import ast
import json
import os
from functools import cache
from pathlib import Path

import pytest

from megatron_grpo.config.availability import FEATURES

TESTS = Path(__file__).parents[1]
OWN = TESTS / "cases"
CASES = Path(os.environ.get("MEGATRON_GRPO_CASES") or OWN)
GROUPS = ("G1", "G2", "G3", "G4", "G5")  # G6 conversion and G7 launch have no part of the package yet
TABLES = ("buffer_cases.json", "config_faults.json", "loss_fixtures.json", "loss_fixtures_own.json")

COVERED = {
    "G1-01": ["buffer_cases.json#G1-01a", "buffer_cases.json#G1-01b", "buffer_cases.json#G1-01c"],
    "G1-02": ["buffer_cases.json#G1-02"],
    "G1-03": ["buffer_cases.json#G1-03"],
    "G1-05": ["buffer_cases.json#G1-05"],
    "G1-07": ["buffer_cases.json#G1-07a", "buffer_cases.json#G1-07b"],
    "G1-09": ["buffer_cases.json#G1-09"],
    "G1-10": ["buffer_cases.json#G1-10"],
    "G1-12": ["buffer_cases.json#G1-12"],
    "G1-13": ["buffer_cases.json#G1-13-32-1", "buffer_cases.json#G1-13-256-8", "config_faults.json#G4-21"],
    "G1-17": ["unit/test_collector.py::test_a_new_version_starts_all_groups_of_the_next_step_at_once"],
    "G1-21": [
        "megatron/test_in_flight.py::test_every_token_follows_its_version_and_the_cache_rule",
        "megatron/test_in_flight_prefixes.py::test_prefixes_are_shared_within_a_version_and_never_across",
    ],
    "G1-23": ["unit/replay/test_buffer.py::test_eight_producers_lose_and_double_nothing"],
    "G1-24": [
        "unit/test_collector_groups.py::test_constant_rewards_end_the_run_after_the_batches_that_the_limit_allows",
        "unit/replay/test_admission.py::test_the_limit_counts_whole_batches_per_step",
    ],
    "G2-01": ["buffer_cases.json#G2-01", "buffer_cases.json#G2-01b"],
    "G2-06": [
        "unit/data/test_saved_prompts.py::test_a_run_without_alignment_stays_so_with_its_descendants",
        "unit/test_resume.py::test_a_checkpoint_without_alignment_goes_on_at_its_cursor",
    ],
    "G2-07": ["buffer_cases.json#G2-07"],
    "G2-10": ["buffer_cases.json#G2-10"],
    "G2-11": [
        "unit/replay/test_storage.py::test_a_missing_key_is_named_with_the_file",
        "unit/replay/test_storage.py::test_what_does_not_fit_together_is_named_with_the_file",
    ],
    "G2-13": [
        "unit/test_resume.py::test_a_buffer_that_is_absent_or_not_wanted_starts_empty",
        "unit/checkpoint/test_directory.py::test_only_the_replay_buffer_may_be_absent",
    ],
    "G2-15": [
        "unit/checkpoint/test_directory.py::test_the_latest_is_the_highest_number_of_complete_directories",
        "unit/checkpoint/test_directory.py::test_a_later_directory_without_its_manifest_is_not_skipped_in_silence",
    ],
    "G2-18": [
        "unit/test_resume.py::test_other_data_is_refused_with_both_numbers",
        "ray/test_resume.py::test_other_data_and_other_group_sizes_are_refused_before_anything_starts",
    ],
    "G2-19": [
        "unit/data/test_datasets.py::test_fewer_rows_than_a_step_are_refused_naming_both_numbers",
        "unit/data/test_stream.py::test_fewer_rows_than_a_batch_are_refused",
    ],
    "G2-20": [
        "unit/data/test_stream.py::test_ten_prompts_four_a_step_two_epochs_are_four_steps_of_distinct_prompts",
        "unit/data/test_stream.py::test_forty_five_rows_twelve_a_step_three_epochs_are_nine_steps",
        "ray/test_end_to_end.py::test_a_users_environment_trains_until_its_rows_are_used_up",
    ],
    "G2-22": ["ray/test_resume.py::test_a_finished_run_started_again_starts_nothing"],
    "G2-24": [
        "unit/data/test_saved_prompts.py::test_a_resumed_run_keeps_the_uninterrupted_order_through_epochs",
        "ray/test_resume.py::test_a_synchronous_run_that_was_stopped_goes_on_as_if_it_had_not_been",
    ],
    "G2-27": [
        "unit/data/test_saved_prompts.py::test_prompts_of_restored_groups_are_not_handed_out_again",
        "ray/test_resume.py::test_a_synchronous_run_that_was_stopped_goes_on_as_if_it_had_not_been",
    ],
    "G3-01": ["loss_fixtures.json#A-01"],
    "G3-03": ["loss_fixtures.json#A-04"],
    "G3-04": [
        "loss_fixtures_own.json#own-kl-k1",
        "loss_fixtures.json#B-01-k2",
        "loss_fixtures.json#B-01-k3",
        "loss_fixtures.json#B-02",
    ],
    "G3-07": ["loss_fixtures.json#C-01"],
    "G3-08": ["loss_fixtures.json#C-02", "loss_fixtures_own.json#own-long-sequence-weight"],
    "G3-09": ["loss_fixtures.json#C-03", "loss_fixtures_own.json#own-tis-floor"],
    "G3-13": [
        "loss_fixtures.json#D-01",
        "loss_fixtures.json#D-02--inf",
        "loss_fixtures_own.json#own-poison-nan",
        "loss_fixtures_own.json#own-poison-plus200",
        "loss_fixtures_own.json#own-poison-minus1e4",
    ],
    "G3-15": ["loss_fixtures.json#E-01", "loss_fixtures_own.json#own-ranks-1-and-5-tokens"],
    "G3-19": ["loss_fixtures.json#G-03", "loss_fixtures.json#G-04", "loss_fixtures.json#G-05"],
    "G3-21": ["loss_fixtures.json#G-06", "loss_fixtures.json#G-07", "loss_fixtures_own.json#own-float-noise"],
    "G3-24": ["loss_fixtures.json#H-01", "loss_fixtures_own.json#own-icepop", "loss_fixtures.json#C-05"],
    "G5-01": [
        "ray/test_faults.py::test_a_killed_generation_worker_ends_the_run_by_name",
        "unit/test_collector.py::test_the_first_failure_stops_the_run_with_the_workers_own_error",
    ],
    "G5-04": [
        "unit/test_collector.py::test_a_tolerated_failure_is_logged_counted_dropped_and_refilled",
        "unit/rollout/test_rewards.py::test_an_environments_error_carries_its_text_and_traceback_and_the_worker_goes_on",
        "ray/test_end_to_end.py::test_an_environment_that_raises_ends_the_run_with_its_own_words",
    ],
    "G5-06": [
        "unit/rollout/test_reward_values.py::test_what_is_not_finite_is_masked_and_shown",
        "unit/rollout/test_reward_values.py::test_a_wrong_number_of_rewards_is_refused",
        "unit/rollout/test_reward_values.py::test_a_column_of_rewards_is_read_row_by_row",
        "unit/rollout/test_group.py::test_an_unusable_reward_masks_its_sample_and_names_prompt_and_value",
    ],
    "G5-09": [
        "unit/rollout/test_group.py::test_an_empty_completion_trains_nothing_and_a_lone_eos_one_token",
        "unit/rollout/test_group.py::test_a_group_of_only_empty_completions_is_still_a_group",
        "loss_fixtures.json#D-04",
    ],
    "G5-11": [
        "unit/data/test_tokenize.py::test_a_missing_pad_token_falls_back_to_eos_with_a_log",
        "unit/data/test_tokenize.py::test_a_missing_eos_token_is_refused_by_name",
    ],
    "G5-12": ["unit/data/test_prompts_hard.py::test_overlong_prompts_are_skipped_and_the_batches_stay_full"],
    "G5-14": [
        "unit/data/test_prompts_hard.py::test_the_broken_line_is_refused_with_file_and_line",
        "unit/data/test_prompts_hard.py::test_unusable_rows_are_named_by_id_and_field",
    ],
    "G5-17": [
        "unit/test_signals.py::test_the_deadline_of_the_job_asks_too_and_wants_another_start",
        "unit/test_loop_saves.py::test_a_stop_while_a_step_trains_saves_that_step_and_publishes_nothing",
    ],
    "G5-18": [
        "megatron/test_checkpoint.py::test_a_run_resumes_in_another_layout_and_comes_back",
        "unit/checkpoint/test_saving.py::test_the_loop_goes_on_while_ranks_write_and_a_checkpoint_follows",
    ],
    "G5-20": ["megatron/test_inference_control.py::test_a_dead_engine_fails_every_request_with_its_own_traceback"],
}

LATER = {
    "G2-05": "_streaming_data",  # rows of index-addressable data always carry their ordinal
}


def rows(folder):
    path = folder / "cases.json"
    return [row for row in json.loads(path.read_text()) if row["group"] in GROUPS] if path.exists() else []


@cache
def table_ids(path):
    if not path.exists():
        return frozenset()
    read = json.loads(path.read_text())
    if isinstance(read, list):
        return frozenset(row["id"] for row in read)
    return frozenset(row["id"] for part in read.values() if isinstance(part, list) for row in part)


@cache
def functions_of(path):
    if not path.exists():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions))


def exists(reference):
    table, _, row_id = reference.partition("#")
    if row_id:
        return row_id in table_ids(OWN / table)
    path, _, name = reference.partition("::")
    return name in functions_of(TESTS / path)


def is_in_a_table(row_id, folder):
    """Whether a table of the same folder has this row, perhaps in several parts (`G1-01` -> `G1-01a`, `G1-01b`)."""
    ids = {found for table in TABLES for found in table_ids(folder / table)}
    return any(found == row_id or found[: len(row_id)] == row_id and found[len(row_id) :].isalpha() for found in ids)


def why_uncovered(row_id, folder=OWN):
    if row_id in LATER:
        if LATER[row_id] in {feature.__name__ for feature in FEATURES}:
            return None
        return f"the feature of {LATER[row_id]} has arrived: move row {row_id} to COVERED and name its test"
    missing = [reference for reference in COVERED.get(row_id, []) if not exists(reference)]
    if missing:
        return f"row {row_id} points at what does not exist: {missing}"
    if row_id in COVERED or is_in_a_table(row_id, folder):
        return None
    return f"row {row_id} has no test: add it to COVERED"


@pytest.mark.parametrize("row", rows(CASES), ids=lambda row: row["id"])
def test_a_known_fault_has_its_test(row):
    if CASES != OWN and row["id"] not in {own["id"] for own in rows(OWN)} and not is_in_a_table(row["id"], CASES):
        pytest.skip("prose of another table: nothing here can run it")
    assert why_uncovered(row["id"], CASES) is None


def test_no_row_is_listed_that_the_table_lacks_or_twice():
    ids = {row["id"] for row in rows(OWN)}
    assert not (COVERED.keys() | LATER.keys()) - ids
    assert not COVERED.keys() & LATER.keys()


def test_a_missing_test_a_missing_row_and_an_arrived_feature_are_noticed(monkeypatch):
    assert "has no test" in why_uncovered("G3-99")
    monkeypatch.setitem(COVERED, "G3-98", ["unit/test_loop.py::test_gone", "loss_fixtures.json#Z-9"])
    assert "test_gone" in why_uncovered("G3-98") and "Z-9" in why_uncovered("G3-98")
    monkeypatch.setitem(LATER, "G3-97", "_arrived")
    assert "has arrived" in why_uncovered("G3-97")
