"""`check` as a user sees it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.check import run_check
from megatron_grpo.config.installed import active_kernels
from megatron_grpo.config.yaml_source import read_document, to_yaml
from tests.unit.config.recipes import DISJOINT, VLLM, changed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def write_recipe(*changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(to_yaml(changed(*changes)))
        return str(path)

    return write_recipe


def test_a_valid_recipe_is_shown_with_layout_and_arithmetic(write, capsys):
    assert run_check(write(DISJOINT)) == 0
    out = capsys.readouterr().out
    for text in (
        "is valid",
        "training: 2 rank(s), TP 1",
        "generation: 2 rank(s)",
        "rank 1    node 0   gpu 3",
        "buffer capacity in groups               16   = P x A x 2",
        "groups in flight at most                16   = (A + 1) x P",
        "steps                                    8   =",
        "layers",
    ):
        assert text in out


def test_an_engine_with_a_model_of_its_own_is_shown(write, capsys):
    sizes = {
        "cluster.gpus_per_node": 2,
        "policy.megatron_cfg.tensor_model_parallel_size": 2,
        "policy.generation.mcore_generation_config.tensor_model_parallel_size": 1,
    }
    assert run_check(write(sizes)) == 0
    out = capsys.readouterr().out
    assert "colocated) with a model of its own" in out and "generation: 2 rank(s), TP 1" in out


def test_the_shown_recipe_is_a_recipe(write, capsys):
    run_check(write())
    text = capsys.readouterr().out.split("resolved recipe\n")[1].split("\nlayout")[0]
    values = read_document("\n".join(line[2:] for line in text.splitlines())).values
    assert values["grpo"]["async_grpo"]["max_trajectory_age_steps"] == 1
    assert values["policy"]["train_global_batch_size"] == 32


def test_programs_get_json(write, capsys):
    assert run_check(write(VLLM), ["grpo.max_num_steps=3", "grpo.max_rollout_turns=2"], as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["resolved"]["grpo"]["max_num_steps"] == 3
    assert [rank["gpu"] for rank in record["layout"]["generation"]["ranks"]] == [2, 3]
    assert {number["name"]: number["value"] for number in record["derived"]}["steps"] == 3
    assert any("max_rollout_turns" in note for note in record["notes"])


def test_problems_go_to_standard_error_one_a_line(write, capsys):
    assert run_check(write({"grpo.max_num_epochs": 0, "grpo.seed": "x"})) == 2
    captured = capsys.readouterr()
    headline, *lines = captured.err.splitlines()
    assert captured.out == "" and "2 problem(s)" in headline
    assert len(lines) == 2 and "grpo.max_num_epochs" in lines[0] and "grpo.seed" in lines[1]


def test_programs_get_problems_as_json_too(write, capsys):
    assert run_check(write({"grpo.seed": "x"}), as_json=True) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["valid"] is False and "grpo.seed" in captured.err


def test_a_key_without_effect_is_a_warning_and_under_strict_an_error(write, capsys):
    path = write({"checkpointing.save_period": 3})
    assert run_check(path) == 0
    assert "checkpointing.save_period" in capsys.readouterr().out
    assert run_check(path, strict=True) == 2
    assert "checkpointing.save_period" in capsys.readouterr().err


def test_strict_lets_unreadable_files_pass(write):
    assert run_check(write({"policy.model_name": "nobody/nothing", "policy.model_config": None}), strict=True) == 0


def test_a_missing_recipe_is_named_whole(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_check("gone.yaml") == 2
    assert str(tmp_path / "gone.yaml") in capsys.readouterr().err


def test_environment_values_are_masked(write, capsys, monkeypatch):
    monkeypatch.setenv("MY_LOGS", "/hidden/away")
    assert run_check(write({"logger.log_dir": "${oc.env:MY_LOGS}"})) == 0
    out = capsys.readouterr().out
    assert "/hidden/away" not in out and "${oc.env:MY_LOGS}" in out


def test_check_imports_nothing_heavy(write):
    heavy = ["ray", "torch", "megatron", "vllm", "transformers", "numpy"]
    program = (
        "import sys; from megatron_grpo.__main__ import main; "
        f"code = main(['check', {write()!r}]); "
        f"loaded = [name for name in {heavy!r} if name in sys.modules]; "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_command_line_refuses_without_a_traceback(write):
    command = [sys.executable, "-m", "megatron_grpo", "check", write({"grpo.tpyo": 1})]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and "grpo.tpyo" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def installed(tmp_path, monkeypatch):
    def install(*files):
        for name in files:
            path = tmp_path / "packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise ImportError('must not be imported')\n")
        monkeypatch.syspath_prepend(tmp_path / "packages")

    return install


def test_without_cuda_torch_and_local_layers_are_active(installed):
    installed("apex/__init__.py", "apex/optimizers/fused_adam.py", "transformer_engine/__init__.py")
    kernels = active_kernels("cpu", "auto")
    assert (kernels.fused_adam, kernels.layer_spec) == ("torch AdamW", "local")


def test_nvidias_apex_is_told_from_the_package_of_that_name(installed):
    installed("apex/__init__.py")
    assert active_kernels("cuda", "auto").fused_adam == "torch AdamW"
    installed("apex/optimizers/fused_adam.py")
    assert active_kernels("cuda", "auto").fused_adam == "apex FusedAdam"


def test_transformer_engine_comes_first_on_cuda(installed):
    installed("apex/__init__.py", "apex/optimizers/fused_adam.py", "transformer_engine/__init__.py")
    assert active_kernels("cuda", "auto").layer_spec == "te"
    kernels = active_kernels("cuda", "local")
    assert (kernels.layer_spec, kernels.fused_adam) == ("local", "Transformer Engine FusedAdam")
