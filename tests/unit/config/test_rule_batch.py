"""Rules on batch arithmetic, lengths and data: what breaks each, what it names, what passes."""

import dataclasses

import pytest

from megatron_grpo.config import rule_batch
from tests.unit.config.recipes import FACTS, VLLM, assert_names, found, only

MCORE = "policy.generation.mcore_generation_config"


def test_a_step_splits_into_updates():
    problem = only(found(rule_batch.step_splits_into_updates, {"policy.train_global_batch_size": 24}))
    assert_names(
        problem,
        "grpo.num_prompts_per_step",
        "grpo.num_generations_per_prompt",
        "policy.train_global_batch_size = 24",
        "32",
    )
    assert found(rule_batch.step_splits_into_updates, {"policy.train_global_batch_size": 16}) == []


def test_an_update_splits_over_ranks_and_micro_batches():
    changes = {"cluster.gpus_per_node": 2, "policy.train_micro_batch_size": 3}
    problem = only(found(rule_batch.update_splits_over_ranks, changes))
    assert_names(problem, "policy.train_global_batch_size = 32", "policy.train_micro_batch_size", "2 x 3 = 6")
    assert found(rule_batch.update_splits_over_ranks, {**changes, "policy.train_micro_batch_size": 4}) == []


def test_the_data_fills_a_step():
    few = dataclasses.replace(FACTS, train_rows=7)
    assert_names(
        only(found(rule_batch.data_fills_a_step, facts=few)), "data.train", "7", "grpo.num_prompts_per_step = 8"
    )
    for rows in (8, None):
        assert found(rule_batch.data_fills_a_step, facts=dataclasses.replace(FACTS, train_rows=rows)) == []


def test_a_completion_may_fill_the_sequence_but_not_exceed_it():
    rule, new = rule_batch.completion_fits_the_sequence, "policy.generation.max_new_tokens"
    total = {"policy.max_total_sequence_length": 512}
    assert_names(only(found(rule, total, {new: 513})), f"{new} = 513", "policy.max_total_sequence_length = 512")
    assert found(rule, total, {new: 512}) == []


def test_the_engine_that_generates_holds_the_sequence():
    rule, short = rule_batch.engine_holds_the_sequence, {f"{MCORE}.max_model_len": 511}
    assert_names(only(found(rule, short)), f"{MCORE}.max_model_len", "policy.max_total_sequence_length")
    assert found(rule, short, VLLM) == []
    assert_names(only(found(rule, VLLM, {"policy.generation.vllm_cfg.max_model_len": 511})), "vllm_cfg.max_model_len")


def test_the_engine_token_limit_is_a_multiple_of_64():
    rule = rule_batch.engine_token_limit_is_rounded
    assert_names(only(found(rule, {f"{MCORE}.max_tokens": 100})), f"{MCORE}.max_tokens", "64")
    assert found(rule, {f"{MCORE}.max_tokens": 128}) == [] and found(rule, {f"{MCORE}.max_tokens": 100}, VLLM) == []


def test_training_data_is_named():
    assert_names(only(found(rule_batch.training_data_is_named, {"data.train": None})), "data.train")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ({}, ["data.train", "path", "env"]),
        ({"env": "sort_digits"}, ["data.train.num_rows", "sort_digits"]),
        ({"path": "a.csv"}, ["data.train.path", ".jsonl", ".parquet"]),
        ({"path": "a.jsonl", "dataset_name": "x"}, ["data.train.path", "data.train.dataset_name"]),
    ],
)
def test_a_data_source_names_a_file_or_a_generator(source, names):
    assert_names(only(found(rule_batch.data_sources_are_whole, {"data.train": source})), *names)


@pytest.mark.parametrize("source", [{"path": "a.jsonl"}, {"path": "a.parquet", "env": "x"}, {"dataset_name": "x"}])
def test_whole_data_sources_pass(source):
    assert found(rule_batch.data_sources_are_whole, {"data.train": source}) == []


def test_the_environment_of_a_source_exists():
    mine = {"data.train.env": "mine"}
    assert_names(
        only(found(rule_batch.environments_exist, mine)), "data.train.env", "mine", "sort_digits", "env.mine.target"
    )
    assert_names(
        only(found(rule_batch.environments_exist, mine, {"env.mine.size": 3})), "env.mine.target", "module:Class"
    )
    assert found(rule_batch.environments_exist, mine, {"env.mine.target": "a.b:C"}) == []
    assert found(rule_batch.environments_exist) == []
