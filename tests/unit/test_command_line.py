"""The command line itself: what it asks for, what it passes on, where it looks for a user's module."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo import __main__ as command_line
from megatron_grpo.checkpoint.lock import run_lock


def test_a_missing_recipe_is_the_only_thing_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["train"])
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "RECIPE" in message and "key=value" not in message


def test_overrides_may_follow_options_and_do_not_stay_for_the_next_call(monkeypatch):
    given = []
    monkeypatch.setattr(command_line, "_check", lambda options: given.append(options.overrides) or 0)
    command_line.main(["check", "r.yaml", "a.b=1", "--json", "c.d=2"])
    command_line.main(["check", "r.yaml", "--strict", "e.f=3"])
    assert given == [["a.b=1", "c.d=2"], ["e.f=3"]]


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["check", "r.yaml", "--jsn"])
    assert "--jsn" in capsys.readouterr().err


def test_verify_and_inspect_know_no_overrides_and_name_what_is_missing(tmp_path, capsys):
    for command, said in (("verify", "no run with a ledger"), ("inspect", "is no checkpoint")):
        assert command_line.main([command, str(tmp_path)]) == 1
        assert said in capsys.readouterr().err
        with pytest.raises(SystemExit):
            command_line.main([command, str(tmp_path), "a.b=1"])
        assert "a.b=1" in capsys.readouterr().err


RECIPE = """
defaults: {base}
data: {{train: {{env: mine, num_rows: 40}}}}
env: {{mine: {{target: "lies_beside_the_recipe:Task"}}}}
"""


def test_the_console_script_finds_a_users_module_in_the_start_directory(tmp_path):
    """`python -m` does by itself: tests/ray/test_end_to_end.py trains with such a module."""
    recipes = Path(__file__).parents[2] / "recipes/llm"
    (tmp_path / "r.yaml").write_text(RECIPE.format(base=recipes / "grpo-sort3-1n1g-megatron_async_colocated.yaml"))
    (tmp_path / "lies_beside_the_recipe.py").write_text("Task = 'found'\n")
    script = Path(sys.executable).with_name("megatron-grpo")
    if not script.exists():
        pytest.skip("the package is not installed beside this Python")
    command = [str(script), "train", "r.yaml"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "lies_beside_the_recipe:Task is a str, not a class" in done.stderr


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_an_early_interrupt_and_a_reader_that_left_end_without_a_traceback(monkeypatch, error, code):
    def raises(options):
        raise error

    monkeypatch.setattr(command_line, "_check", raises)
    monkeypatch.setattr(command_line.os, "dup2", lambda *descriptors: None)
    assert command_line.main(["check", "r.yaml"]) == code


def test_a_second_run_on_one_log_dir_is_refused_and_leaves_its_files_alone(tmp_path, capsys):
    recipe = Path(__file__).parents[2] / "recipes/llm/grpo-sort3-1n1g-megatron_async_colocated.yaml"
    (tmp_path / "metrics.jsonl").write_text("of the first run\n")
    with run_lock(tmp_path):
        assert command_line.main(["train", str(recipe), f"logger.log_dir={tmp_path}"]) == 2
    assert "set logger.log_dir to another directory" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "of the first run\n"
