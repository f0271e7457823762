"""The README keeps its word: its commands run, its recipe and its environment work, its names and limits are true.

Whole runs of its environment, and the metrics it names: tests/ray/test_end_to_end.py.
"""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.check import run_check
from megatron_grpo.config import availability
from megatron_grpo.config.load import load_recipe
from megatron_grpo.config.names import known_keys
from megatron_grpo.rollout.reward_host import RewardHost
from megatron_grpo.workload import prepare_workload
from tests.readme import README, blocks, file_block, write_user_task
from tests.running import REPOSITORY

TEXT = README.read_text()
COMMANDS = [
    line for block in blocks("bash") for line in block.text.splitlines() if line.strip() and not line.startswith("#")
]
PYTHON = ".venv/bin/python"


# A make inside `make test` would announce its directory.
OUTSIDE_MAKE = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def make_recipe(command):
    """The last line that make would run for `command`: what comes before it, if anything, sets `.venv` up."""
    done = subprocess.run(
        ["make", "-n", *shlex.split(command)[1:]],
        check=True,
        cwd=REPOSITORY,
        env=OUTSIDE_MAKE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.splitlines()[-1]


def runnable(command):
    """A command as it is run here: training becomes its dry run, long suites are only collected, scripts parsed."""
    if command.startswith("make") and command != "make help":
        command = make_recipe(command)
    if " -m pytest " in command:
        return re.sub(r" --durations=\d+", "", command) + " --collect-only"
    if " -m megatron_grpo train " in command and "--dry-run" not in command:
        return f"{command} --dry-run"
    if command.endswith((".ci/run", "tests/gpu/run.sh")):
        return f"bash -n {command}"
    if command.startswith(".venv/bin/tensorboard "):
        return f"{PYTHON} -c 'import tensorboard.main'"
    return command


@pytest.fixture
def user_folder(tmp_path):
    """The repository as its reader's start directory, with the user's files in it."""
    write_user_task(tmp_path)
    for name in ("Makefile", "tests", ".ci", "requirements", "setup.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


KNOWN = (f"{PYTHON} -m megatron_grpo ", f"{PYTHON} -m pytest ", "bash -n ", f"{PYTHON} -c ", "make help")


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("make test")])
def test_every_command_of_the_readme_runs(command, user_folder):
    ready = runnable(command)
    assert ready.startswith(KNOWN), f"no way is known to run {command!r} in a test"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ready.replace(PYTHON, shlex.quote(sys.executable)),
        check=False, shell=True, cwd=user_folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_two_commands_come_first_and_make_test_runs_every_folder():
    assert COMMANDS[:2] == ["make train", "make test"]
    printed = subprocess.run(
        ["make", "-n", "test"],
        check=True,
        cwd=REPOSITORY,
        env=OUTSIDE_MAKE,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert all(f"tests/{part}" in printed for part in ("unit", "megatron", "ray"))


def test_the_anatomy_is_a_recipe_without_waste(tmp_path, capsys):
    (tmp_path / "anatomy.yaml").write_text(file_block("anatomy.yaml"))
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    assert run_check(str(tmp_path / "anatomy.yaml"), strict=True) == 0
    assert "not available yet" not in capsys.readouterr().out


def test_the_users_environment_gives_prompts_and_rewards(tmp_path, monkeypatch):
    recipe_path = write_user_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe(recipe_path).recipe
    workload = prepare_workload(recipe)
    assert (len(workload.train_rows), len(workload.validation_rows)) == (640, 256)
    asked = [{row.problem.question for row in rows} for rows in (workload.train_rows, workload.validation_rows)]
    assert not asked[0] & asked[1]
    host = RewardHost({"largest": {"target": recipe.env["largest"].target, **recipe.env["largest"].options}})
    problem = workload.train_rows[0].problem
    right = max(problem.question[:-1])
    assert host.score("largest", problem, [right, right + "0", "", "=" + right]) == [1.0, 0.5, 0.0, 0.0]
    assert host.is_correct("largest", problem, [right, right + "0"]) == [True, False]


def test_the_users_environment_is_as_short_as_promised():
    lines = [line for line in file_block("my_task.py").splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 20


def keys_in(text):
    return re.findall(r"`((?:[a-z_]+\.)+[a-z_0-9]+)(?::[^`]*)?`", text)


SECTIONS = {key.split(".")[0] for key in known_keys()}


def test_every_key_that_the_readme_names_exists():
    named = {key for key in keys_in(TEXT) if key.split(".")[0] in SECTIONS - {"env"} and not key.endswith((".py", ".md"))}
    assert len(named) > 20
    assert named <= set(known_keys())


MCORE = "policy.generation.mcore_generation_config"


def section(name):
    return TEXT.split(f"<!-- {name}:")[1].split(f"<!-- END OF {name} -->")[0].partition("-->")[2]


def test_the_limits_are_those_that_train_refuses():
    """Every feature of config/availability.py is named, and nothing that has arrived."""
    messages = [
        inspect.getsource(feature).replace("{MCORE}", MCORE) for feature in availability.FEATURES
    ]
    told = keys_in(section("LIMITS"))
    unnamed = [text.splitlines()[0] for text in messages if not any(key in text for key in told)]
    assert unnamed == [], "the README does not tell these limits"
    arrived = [key for key in told if not any(key in text for text in messages)]
    assert arrived == [], "the README still calls these not available"


def test_every_file_that_the_readme_points_at_exists():
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in target]
    paths = set(re.findall(r"`((?:recipes|docs|megatron_grpo|tests|tools)/[\w./-]+)`", TEXT))
    recipes = {f"recipes/llm/{name}.yaml" for name in re.findall(r"^\| `(grpo\w?[-\w.]+)` \|", TEXT, re.MULTILINE)}
    assert len(links) >= 3 and len(recipes) >= 6
    assert [path for path in {*links, *paths, *recipes} if not (REPOSITORY / path).exists()] == []


def test_every_folder_is_on_the_map():
    package = REPOSITORY / "megatron_grpo"
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    told = TEXT.partition("## Map of the code")[2]
    assert {name for name in folders if f"`{name}/" not in told} == set()


ARCHITECTURE = (REPOSITORY / "docs/architecture.md").read_text()


def test_the_architecture_has_a_phrase_for_every_file_and_none_for_files_that_are_gone():
    package = REPOSITORY / "megatron_grpo"
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if not (path.name == "__init__.py" or "__pycache__" in path.parts)
    }
    told = {str(Path(name)) for name in re.findall(r"^\| `([\w/]+\.py)` \|", ARCHITECTURE, re.MULTILINE)}
    assert files - told == set(), "docs/architecture.md has no line for these files"
    assert told - files == set(), "docs/architecture.md has a line for files that are gone"
