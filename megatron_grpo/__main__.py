"""Command line: `python -m megatron_grpo` and the console script `megatron-grpo`.

Exit codes: 0 done, or saved and stopped as asked; 1 the run failed; 2 the recipe or its data cannot run (nothing was
started); 130/143 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import ConfigError, Interrupted, MegatronGrpoError

log = logging.getLogger("megatron_grpo")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        if options.command == "verify":
            return _verify(options)
        if options.command == "inspect":
            return _inspect(options)
        if options.command == "check" or options.dry_run:
            return _check(options)
        return _train(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {options.recipe} cannot run:\n")
        sys.stderr.writelines(f"  {problem}\n" for problem in error.problems)
        return 2
    except KeyboardInterrupt:  # before the run listens to signals: nothing was trained
        sys.stderr.write("interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except MegatronGrpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _check(options: argparse.Namespace) -> int:
    from .check import run_check

    return run_check(options.recipe, options.overrides, as_json=options.json, strict=options.strict)


def _verify(options: argparse.Namespace) -> int:
    from .verify import run_verify

    return run_verify(options.run_dir, as_json=options.json)


def _inspect(options: argparse.Namespace) -> int:
    from .inspect_checkpoint import run_inspect

    return run_inspect(options.checkpoint, as_json=options.json)


def _train(options: argparse.Namespace) -> int:
    # A user's env.NAME.target lies in the start directory. `python -m` searches it, the console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from .launch import train

    return train(options.recipe, options.overrides, strict=options.strict)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may also follow options, which argparse alone refuses."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; see --help")
    if rest and "overrides" not in options:
        parser.error(f"unknown argument {rest[0]}; see --help")
    options.overrides = [*vars(options).get("overrides", ()), *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-grpo", description="Asynchronous GRPO on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megatron-grpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train as the recipe says")
    train.add_argument("--dry-run", action="store_true", help="the same as check")
    check = commands.add_parser("check", help="validate a recipe, show its layout and arithmetic; starts nothing")
    check.set_defaults(dry_run=True)
    for command in (train, check):
        command.add_argument("recipe", metavar="RECIPE", help="a YAML file, e.g. recipes/llm/NAME.yaml")
        # The default keeps argparse from calling the overrides required where the recipe is missing.
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="e.g. grpo.max_num_steps=5"
        )
        command.add_argument("--json", action="store_true", help="check: machine-readable output")
        command.add_argument("--strict", action="store_true", help="warnings are errors")
    _add_checkpoint_commands(commands)
    return parser


def _add_checkpoint_commands(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser("verify", help="prove from a run's ledger that every prompt was trained once")
    verify.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpointing.checkpoint_dir of the run")
    inspect = commands.add_parser("inspect", help="show what a checkpoint holds; starts nothing")
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="step_N, or the directory of all of them")
    for command in (verify, inspect):
        command.set_defaults(dry_run=False)
        command.add_argument("--json", action="store_true", help="machine-readable output")


if __name__ == "__main__":
    sys.exit(main())
