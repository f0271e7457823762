"""Command line: `python -m megatron_grpo` and the console script `megatron-grpo`.

Exit codes: 0 done, 1 the run failed, 2 the recipe or its data cannot run (nothing was started), 130/143 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from . import __version__
from .errors import ConfigError, Interrupted, MegatronGrpoError

log = logging.getLogger("megatron_grpo")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        if options.command == "check" or options.dry_run:
            return _check(options)
        return _train(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {options.recipe} cannot run:\n")
        sys.stderr.writelines(f"  {problem}\n" for problem in error.problems)
        return 2
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except MegatronGrpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _check(options: argparse.Namespace) -> int:
    from .check import run_check

    return run_check(options.recipe, options.overrides, as_json=options.json, strict=options.strict)


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
    options.overrides = [*options.overrides, *rest]
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
