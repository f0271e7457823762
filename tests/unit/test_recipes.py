"""Every shipped recipe loads, passes `check`, and says what its name says."""

import re
from pathlib import Path

import pytest

from megatron_grpo.check import run_check
from megatron_grpo.config.load import load_recipe
from megatron_grpo.config.names import schema_defaults, schema_keys
from megatron_grpo.config.schema import Recipe
from megatron_grpo.config.sources import leaves, value_at
from megatron_grpo.config.yaml_source import read_document

FOLDER = Path(__file__).parents[2] / "recipes" / "llm"
RECIPES = sorted(FOLDER.glob("*.yaml"))
BASE = FOLDER / "grpo_math_1B.yaml"
NAME = re.compile(r"grpo-(?P<model>.+)-(?P<nodes>\d+)n(?P<gpus>\d+)g-(?P<backend>megatron|vllm)(?P<rest>(_\w+)?)$")
SMALL = [path for path in RECIPES if re.match(r"grpo-(spell|sort3)-", path.name)]


def by_name(name: str) -> Recipe:
    return load_recipe(FOLDER / f"{name}.yaml").recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_passes_check(path, capsys):
    assert run_check(str(path)) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", [path for path in RECIPES if path != BASE], ids=lambda path: path.stem)
def test_a_name_says_size_backend_and_mode(path):
    parts = NAME.match(path.stem)
    assert parts is not None
    recipe, tokens = load_recipe(path).recipe, parts["rest"].split("_")[1:]
    async_grpo = recipe.grpo.async_grpo
    assert (recipe.cluster.num_nodes, recipe.cluster.gpus_per_node) == (int(parts["nodes"]), int(parts["gpus"]))
    assert recipe.policy.generation.backend == parts["backend"]
    assert ("async" in tokens) == async_grpo.enabled
    assert ("colocated" in tokens) == recipe.policy.generation.colocated.enabled
    assert ("recompute" in tokens) == async_grpo.recompute_kv_cache_after_weight_updates
    assert path.stem in recipe.logger.log_dir


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_small_recipes_run_in_this_version_and_waste_no_word(path):
    loaded = load_recipe(path)
    assert loaded.warnings == () and loaded.notes == ()
    assert loaded.recipe.policy.generation.val_temperature == 0
    assert loaded.recipe.data.validation.num_rows == loaded.recipe.grpo.max_val_samples == 256
    assert len(path.read_text().splitlines()) < 50


def test_the_base_names_every_key_with_a_comment():
    values = read_document(BASE.read_text()).values
    nullable = ("policy.model_config.", "data.validation.", "warm_start.")
    missing = [
        key
        for key in schema_keys()
        if not key.startswith(nullable) and key != "env" and not _present(values, key.split("."))
    ]
    assert missing == []
    comments = sum("#" in line for line in BASE.read_text().splitlines())
    assert comments > 0.6 * len(leaves(values))


def _present(values, parts):
    return parts[0] in values and (len(parts) == 1 or _present(values[parts[0]], parts[1:]))


def test_the_base_repeats_the_defaults():
    own = {"policy.model_name", "policy.tokenizer.name", "policy.train_global_batch_size", "policy.logprob_batch_size"}
    resolved, defaults = load_recipe(BASE).resolved, schema_defaults()
    for key in leaves(defaults):
        dotted = ".".join(key)
        if dotted not in own and not dotted.startswith(("data.", "env")):
            assert value_at(resolved, key) == value_at(defaults, key), dotted


def test_the_named_hybrid_recipe_has_its_values():
    recipe = by_name("grpo-nanov3-30BA3B-4n4g-megatron_async_colocated")
    grpo, policy, megatron = recipe.grpo, recipe.policy, recipe.policy.megatron_cfg
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt) == (2, 8)
    assert (grpo.async_grpo.max_trajectory_age_steps, grpo.async_grpo.in_flight_weight_updates) == (4, True)
    assert not grpo.async_grpo.recompute_kv_cache_after_weight_updates
    assert policy.generation.mcore_generation_config.kv_cache_management_mode == "persist"
    assert recipe.loss_fn.use_importance_sampling_correction
    assert (recipe.checkpointing.enabled, recipe.checkpointing.save_period) == (False, 100)
    assert policy.model_name == "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"
    assert policy.tokenizer.name == "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    batches = (policy.train_global_batch_size, policy.train_micro_batch_size, policy.logprob_batch_size)
    assert batches == (16, 1, 1) and policy.max_total_sequence_length == 2048
    assert (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size) == (2, 8)
    assert (megatron.pipeline_model_parallel_size, megatron.context_parallel_size) == (1, 1)
    assert megatron.sequence_parallel and not megatron.bias_activation_fusion
    assert not policy.sequence_packing.enabled and recipe.cluster.segment_size == 2
    assert recipe.logger.tensorboard_enabled and recipe.logger.wandb_enabled


def test_the_guides_example_has_its_values():
    recipe = by_name("grpo-qwen2.5-1.5B-2n4g-vllm_async")
    assert (recipe.grpo.num_prompts_per_step, recipe.grpo.num_generations_per_prompt) == (32, 4)
    resources = recipe.policy.generation.colocated.resources
    assert (resources.num_nodes, resources.gpus_per_node) == (1, 2)


def test_the_spelling_task_has_its_values():
    recipe = by_name("grpo-spell-1n2g-megatron_async")
    optimizer = recipe.policy.megatron_cfg.optimizer
    assert (optimizer.lr, optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (4e-4, 0.99, 0, 1)
    assert (recipe.loss_fn.entropy_coef, recipe.policy.generation.max_new_tokens) == (0.004, 7)
    assert (recipe.warm_start.num_steps, recipe.warm_start.batch_size, recipe.warm_start.lr) == (110, 64, 5e-3)
    assert recipe.env["spell"].options["dataset_options"] == {"min_word_len": 3, "max_word_len": 4}
    assert (recipe.loss_fn.ratio_clip_min, recipe.loss_fn.ratio_clip_max) == (0.2, 0.28)


def test_the_sync_twin_differs_in_nothing_but_asynchrony():
    twins = ["grpo-sort3-1n1g-megatron_async_colocated", "grpo-sort3-1n1g-megatron_colocated"]
    asynchronous, synchronous = (by_name(name).model_dump() for name in twins)
    for values in (asynchronous, synchronous):
        del values["logger"]["log_dir"], values["grpo"]["async_grpo"]["enabled"]
    assert asynchronous == synchronous
