"""What a run works on, prepared in the driver before anything starts: problems, tokenizer, prompt rows, warm start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .config.derived import num_steps
from .config.schema import Recipe
from .data.datasets import Split, encode_rows, load_split, max_prompt_tokens, require_rows
from .data.stream import PromptRow
from .data.tokenize import build_tokenizer
from .data.warm_start import supervised_batches
from .errors import ConfigError
from .interfaces import Environment, Tokenizer
from .rollout.environments import build_environment
from .types import Problem, SupervisedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`num_steps` is the run's length; `validation_rows` is empty when the recipe validates nothing."""

    tokenizer: Tokenizer
    train: Split
    train_rows: Sequence[PromptRow]
    validation_rows: Sequence[PromptRow]
    environment: Environment
    num_steps: int

    def warm_start_batches(self, recipe: Recipe, pad_multiple: int) -> Iterator[SupervisedBatch]:
        assert recipe.warm_start is not None
        return supervised_batches(
            self.train.problems,
            self.environment,
            self.tokenizer,
            num_steps=recipe.warm_start.num_steps,
            batch_size=recipe.warm_start.batch_size,
            seed=recipe.grpo.seed,
            pad_multiple=pad_multiple,
        )


def prepare_workload(recipe: Recipe) -> Workload:
    """Raises ConfigError or DataError for whatever the recipe's data cannot provide."""
    train = load_split(recipe, "train", lambda name: _environment(recipe, name))
    if train is None:
        raise ConfigError("data.train is missing: say where prompts come from (a path, or env and num_rows)")
    validation = load_split(recipe, "validation", lambda name: _environment(recipe, name))
    held_out = validation.problems[: recipe.grpo.max_val_samples] if validation else ()
    environment = _environment(recipe, train.env_name)
    tokenizer = build_tokenizer(recipe, [*train.problems, *held_out], _solutions(recipe, environment, train.problems))
    _check_vocabulary(recipe, tokenizer)
    limit = max_prompt_tokens(recipe)
    train_rows = encode_rows(
        train.problems, tokenizer, env_name=train.env_name, max_prompt_tokens=limit, source="data.train"
    )
    require_rows(
        len(train_rows),
        recipe.grpo.num_prompts_per_step,
        "data.train",
        num_too_long=len(train.problems) - len(train_rows),
        max_tokens=limit,
    )
    return Workload(
        tokenizer=tokenizer,
        train=train,
        train_rows=train_rows,
        validation_rows=encode_rows(
            held_out,
            tokenizer,
            env_name=validation.env_name if validation else "",
            max_prompt_tokens=limit,
            source="data.validation",
        ),
        environment=environment,
        num_steps=num_steps(recipe, len(train_rows)),
    )


def _check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    given = recipe.policy.architecture.vocab_size if recipe.policy.architecture else None
    if given is not None and given != tokenizer.vocab_size:
        raise ConfigError(
            f"policy.model_config.vocab_size is {given}, but the tokenizer has {tokenizer.vocab_size} ids: leave it out"
        )


def _environment(recipe: Recipe, name: str) -> Environment:
    if name not in recipe.env:
        raise ConfigError(f"the data names the environment {name!r}, but the recipe has no env.{name} block")
    block = recipe.env[name]
    return build_environment(name, {"target": block.target, **block.options})


def _solutions(recipe: Recipe, environment: Environment, problems: Iterable[Problem]) -> Iterable[str]:
    return [environment.solution(problem) for problem in problems] if recipe.warm_start else ()
