"""Recipe file -> recipe, or every problem at once."""

import random

import pytest

from megatron_grpo.config.load import load_recipe
from megatron_grpo.config.names import known_keys
from megatron_grpo.config.yaml_source import read_document, to_yaml
from megatron_grpo.errors import ConfigError
from tests.unit.config.recipes import changed


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text if isinstance(text, str) else to_yaml(text))
        return path

    write_file(changed(), "base.yaml")
    return write_file


def problems(path, *overrides):
    with pytest.raises(ConfigError) as refused:
        load_recipe(path, overrides)
    return refused.value.problems


def test_a_recipe_loads_with_defaults_overrides_and_interpolation(write):
    path = write("defaults: base.yaml\ndata:\n  max_input_seq_length: ${policy.max_total_sequence_length}\n")
    loaded = load_recipe(path, ["policy.max_total_sequence_length=320", "policy.generation.max_new_tokens=8"])
    assert loaded.recipe.data.max_input_seq_length == 320
    assert loaded.resolved["data"]["max_input_seq_length"] == 320
    assert loaded.recipe.policy.generation.temperature == 1.0
    assert loaded.path == path


def test_explicit_keys_are_those_of_the_named_file_and_the_command_line(write):
    loaded = load_recipe(write("defaults: base.yaml\ngrpo:\n  seed: 1\n"), ["cluster.num_nodes=1"])
    assert loaded.explicit_keys == {"grpo.seed", "cluster.num_nodes"}


def test_all_problems_come_at_once(write, monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    path = write(
        "defaults: base.yaml\n"
        "grpo:\n"
        "  seed: 1\n"
        "  seed: 2\n"
        "  max_num_steps: many\n"
        "  typo: 1\n"
        "loss_fn:\n"
        "  ratio_clip_c: 0.5\n"
        "  use_kl_in_reward: true\n"
        "logger:\n"
        "  log_dir: ${oc.env:NOT_THERE}\n"
        "policy:\n"
        "  max_grad_norm: 0.5\n"
        "  megatron_cfg:\n"
        "    optimizer:\n"
        "      clip_grad: 0.7\n"
    )
    found = problems(path, "policy.no_such_key=1", "broken")
    wanted = [
        "grpo.seed",
        "max_num_steps",
        "typo",
        "ratio_clip_c",
        "use_kl_in_reward",
        "NOT_THERE",
        "max_grad_norm",
        "no_such_key",
        "'broken'",
    ]
    assert [sum(name in problem for problem in found) for name in wanted] == [1] * len(wanted), found
    assert len(found) == len(wanted)


def test_problems_name_file_and_line(write):
    path = write("defaults: base.yaml\ngrpo:\n  max_num_epochs: 0\n")
    assert problems(path) == [f"grpo.max_num_epochs: must be >= 1, got 0 ({path}, line 3)"]


def test_a_rule_names_where_its_keys_are_set(write):
    path = write("defaults: base.yaml\nloss_fn:\n  use_importance_sampling_correction: false\n")
    [problem] = problems(path)
    assert f"{path}, line 3" in problem


def test_a_rule_does_not_judge_the_default_of_a_refused_key(write):
    path = write("defaults: base.yaml\npolicy:\n  generation:\n    max_new_tokens: '9'\n")
    [problem] = problems(path, "policy.max_total_sequence_length=4")
    assert "expected an integer" in problem


def test_a_section_without_a_required_key_is_told_once(write):
    [problem] = problems(write("defaults: base.yaml\n"), "policy.model_config.hidden_size=wide")
    assert "policy.model_config.hidden_size: expected an integer" in problem
    [problem] = problems(write("defaults: base.yaml\n"), "warm_start={lr: 0.1}")
    assert "warm_start.num_steps: must be given" in problem


def test_a_missing_parent_is_the_only_problem_told(write):
    [problem] = problems(write("defaults: nope.yaml\n"))
    assert "nope.yaml" in problem


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("grpo.async_grpo.enabled", '"false"', "remove the quotes"),
        ("grpo.async_grpo.enabled", "1", "expected true or false"),
        ("grpo.seed", "true", "expected an integer"),
        ("grpo.seed", "1.5", "expected an integer"),
        ("grpo.seed", "'3'", "remove the quotes"),
        ("loss_fn.ratio_clip_c", "None", "write null"),
        ("loss_fn.ratio_clip_c", ".nan", "finite"),
        ("policy.megatron_cfg.optimizer.lr", "fast", "expected a number"),
        ("loss_fn.reference_policy_kl_type", "k4", "'k1', 'k2', 'k3'"),
        ("policy.generation.temperature", "0", "must be > 0"),
        ("policy.megatron_cfg.optimizer.adam_beta2", "1", "must be < 1"),
        ("policy.generation.stop_strings", "x", "expected a list"),
        ("policy.generation.stop_token_ids", "[1, x]", "expected an integer"),
        ("logger", "[1]", "expected a mapping"),
        ("env.mine", "{target: here}", "'package.module:Class'"),
        ("checkpointing.checkpoint_must_save_by", "12", "expected text"),
        ("checkpointing.checkpoint_must_save_by", "4:00:00", "DD:HH:MM:SS"),
        ("checkpointing.checkpoint_must_save_by", "00:25:99:00", "DD:HH:MM:SS"),
        ("grpo.async_grpo.max_trajectory_age_steps", "null", "expected an integer, got null"),
    ],
)
def test_wrong_values_are_explained(write, key, value, expected):
    found = problems(write("defaults: base.yaml\n"), f"{key}={value}")
    assert any(key in problem and expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("grpo.async_grpo.max_trajectory_age_step", "did you mean grpo.async_grpo.max_trajectory_age_steps?"),
        ("grpo.max_trajectory_age_steps", "it lives at grpo.async_grpo.max_trajectory_age_steps"),
        ("max_num_steps", "it lives at grpo.max_num_steps"),
        ("grpo.async_grpo.max_num_steps", "it lives at grpo.max_num_steps"),
        ("policy.megatron.tensor_model_parallel_size", "did you mean policy.megatron_cfg?"),
        ("data.seed", "it lives at data.train.seed or data.validation.seed or grpo.seed"),
        ("grop.seed", "did you mean grpo?"),
        ("policy.generation.max_new_token", "did you mean policy.generation.max_new_tokens?"),
        ("policy.architecture", "unknown key"),
        ("policy.sequence_packing.train_mb_token", "did you mean policy.sequence_packing.train_mb_tokens?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(write, key, advice):
    [problem] = problems(write("defaults: base.yaml\n"), f"{key}=4")
    assert "unknown key" in problem and advice in problem and "command line" in problem


def test_options_of_an_environment_are_free(write):
    loaded = load_recipe(
        write("defaults: base.yaml\n"), ["+env.sort_digits.num_digits=4", "env.sort_digits.num_workers=2"]
    )
    block = loaded.recipe.env["sort_digits"]
    assert block.options == {"num_digits": 4} and block.num_workers == 2


def test_a_built_in_environment_needs_no_block(write):
    assert "sort_digits" in load_recipe(write("defaults: base.yaml\n")).recipe.env


def test_values_of_the_environment_are_neither_saved_nor_shown(write, monkeypatch):
    monkeypatch.setenv("RUN_ROOT", "/very/secret/place")
    path = write("defaults: base.yaml\nlogger:\n  log_dir: ${oc.env:RUN_ROOT}/logs\n")
    loaded = load_recipe(path)
    assert loaded.recipe.logger.log_dir == "/very/secret/place/logs"
    assert loaded.resolved["logger"]["log_dir"] == "${oc.env:RUN_ROOT}/logs"
    monkeypatch.setenv("RUN_ROOT", "swordfish")
    found = problems(write("defaults: base.yaml\ngrpo:\n  seed: ${oc.env:RUN_ROOT}\n"))
    assert "swordfish" not in str(found) and "${oc.env:RUN_ROOT}" in str(found)


def test_the_resolved_recipe_loads_again_to_the_same_recipe(write):
    loaded = load_recipe(write("defaults: base.yaml\n"), ["policy.precision=float32", "policy.max_grad_norm=0.5"])
    again = load_recipe(write(to_yaml(loaded.resolved), "again.yaml"))
    assert again.recipe == loaded.recipe
    assert read_document(to_yaml(loaded.resolved)).problems == ()


def test_files_that_are_not_here_are_warnings(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(
        write("defaults: base.yaml\n"),
        ["policy.model_name=nobody/nothing", "data.train={path: gone.jsonl}", "data.validation={path: lost.jsonl}"],
    )
    assert len(loaded.unreadable) == 3
    for name in ("policy.model_name", "gone.jsonl", "lost.jsonl"):
        assert any(name in warning for warning in loaded.unreadable)
    assert set(loaded.unreadable) <= set(loaded.warnings)


def test_rows_of_a_readable_file_count(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"problem": "1", "expected_answer": "1"}\n\n' * 7)
    [problem] = problems(write("defaults: base.yaml\n"), "data.train={path: rows.jsonl}")
    assert "7 rows" in problem and "num_prompts_per_step" in problem


def test_the_shape_of_a_local_model_counts(write, tmp_path):
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text('{"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 5}')
    overrides = [f"policy.model_name={tmp_path / 'model'}", "policy.megatron_cfg.tensor_model_parallel_size=4"]
    found = problems(write("defaults: base.yaml\n"), *overrides, "cluster.gpus_per_node=4")
    assert any("6 attention heads" in problem for problem in found)
    config.write_text("not json")
    loaded = load_recipe(write("defaults: base.yaml\n"), [*overrides, "cluster.gpus_per_node=4"])
    assert any("policy.model_name" in warning for warning in loaded.unreadable)


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (
            ["grpo.async_grpo.enabled=false", "grpo.async_grpo.max_trajectory_age_steps=2"],
            "max_trajectory_age_steps",
            "grpo.async_grpo.enabled",
        ),
        (["policy.generation.vllm_cfg.async_engine=true"], "vllm_cfg.async_engine", "backend is megatron"),
        (["policy.generation.vllm_cfg.kv_cache_dtype=fp8"], "kv_cache_dtype", "backend is megatron"),
        (
            ["policy.generation.colocated.resources.gpus_per_node=1"],
            "resources.gpus_per_node",
            "colocated.enabled is true",
        ),
        (["grpo.reward_scaling.source_min=0.5"], "source_min", "reward_scaling.enabled is false"),
        (["loss_fn.reference_policy_kl_penalty=0", "loss_fn.reference_policy_kl_type=k1"], "kl_type", "penalty is 0"),
        (["checkpointing.save_period=5"], "save_period", "checkpointing.enabled is false"),
        (["grpo.val_period=5"], "val_period", "data.validation is null"),
        (["policy.megatron_cfg.optimizer.min_lr=1e-9"], "min_lr", "lr_decay_style is constant"),
        (["policy.make_sequence_length_divisible_by=8"], "divisible_by", "derived"),
        (["env.spare.target=a.b:C"], "env.spare", "no data source uses"),
    ],
)
def test_a_key_without_effect_is_a_warning_with_the_reason(write, overrides, key, why):
    loaded = load_recipe(write("defaults: base.yaml\n"), overrides)
    assert any(key in line and why in line for line in loaded.ineffective), loaded.ineffective


def test_inherited_keys_and_nulls_ask_for_nothing(write):
    path = write(
        "defaults: base.yaml\npolicy:\n  generation:\n    vllm_cfg:\n      async_engine: true\n", "middle.yaml"
    )
    child = write(
        "defaults: middle.yaml\nloss_fn:\n  ratio_clip_c: null\nlogger:\n  wandb:\n    name: null\n", "child.yaml"
    )
    assert load_recipe(path).ineffective != () and load_recipe(child).ineffective == ()


WILD = [
    "1",
    "-1",
    "1.5",
    "true",
    "null",
    "x",
    "[]",
    "{}",
    "{a: 1}",
    "???",
    "${grpo.seed}",
    "${nope}",
    "${",
    ".nan",
    "vllm",
]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_a_recipe_loads_or_is_refused_in_words(write, seed):
    rng, path = random.Random(seed), write("defaults: base.yaml\n")
    for _ in range(15):
        keys = rng.choices([*known_keys(), "env.x", "a.b", "policy.model_config.head_dim"], k=rng.choice([1, 2, 4]))
        overrides = [f"{key}{rng.choice(['', '', '.x'])}={rng.choice(WILD)}" for key in keys]
        try:
            load_recipe(path, overrides)
        except ConfigError as error:
            assert error.problems and all(problem.strip() for problem in error.problems)
