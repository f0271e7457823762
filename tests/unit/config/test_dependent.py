"""Defaults that depend on another key."""

from megatron_grpo.config.dependent import fill
from megatron_grpo.config.schema import Recipe
from tests.unit.config.recipes import recipe


def test_one_update_per_step_unless_given():
    assert recipe().policy.train_global_batch_size == 32
    assert recipe({"policy.train_global_batch_size": None}).policy.train_global_batch_size == 32
    assert recipe({"policy.train_global_batch_size": 8}).policy.train_global_batch_size == 8
    assert Recipe().policy.train_global_batch_size == 32 * 16


def test_log_probs_come_in_training_micro_batches_unless_given():
    assert recipe({"policy.train_micro_batch_size": 4}).policy.logprob_batch_size == 4
    assert recipe({"policy.train_micro_batch_size": 4, "policy.logprob_batch_size": 2}).policy.logprob_batch_size == 2


def test_only_vllm_gets_its_own_gpus_by_itself():
    assert recipe().policy.generation.colocated.enabled
    assert not recipe({"policy.generation.backend": "vllm"}).policy.generation.colocated.enabled
    assert recipe({"policy.generation.colocated.enabled": None}).policy.generation.colocated.enabled


def test_the_tokenizer_is_the_models_own_or_built_from_the_task():
    assert recipe().policy.tokenizer.name == "task"
    assert recipe({"policy.model_name": "a/b"}).policy.tokenizer.name == "a/b"
    assert recipe({"policy.tokenizer.name": "c"}).policy.tokenizer.name == "c"


def test_a_source_takes_the_default_environment():
    rows = {"data.train": {"path": "a.jsonl"}}
    assert recipe(rows).data.train.env == "math"
    assert recipe(rows, {"data.default.env_name": "sort_digits"}).data.train.env == "sort_digits"
    assert recipe({"data.train": {"num_rows": 3}}).data.train.env is None


def test_values_of_a_wrong_type_are_left_for_the_schema():
    for values in (
        {"policy": 3},
        {"data": [1]},
        {"env": "x"},
        {"grpo": {"num_prompts_per_step": True}},
        {"policy": {"generation": 1}},
    ):
        filled = fill(values)
        assert all(filled[key] == value or isinstance(value, dict) for key, value in values.items())
    assert "train_global_batch_size" not in fill({"grpo": {"num_prompts_per_step": "8"}})["policy"]
