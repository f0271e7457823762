"""The object inside a reward worker process: builds environments when first needed and asks them.

Knows nothing of processes or deadlines: whoever holds the process kills it. Calls do not overlap (the pool sends one
at a time), but may come from different threads.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, RewardFailed
from ..interfaces import Environment
from ..types import Problem
from .environments import build_environment
from .reward_values import as_number


class RewardHost:
    """`blocks` are the recipe's `env.NAME` blocks by name."""

    def __init__(self, blocks: Mapping[str, Mapping[str, Any]]):
        self._blocks = {name: dict(block) for name, block in blocks.items()}
        self._environments: dict[str, Environment] = {}

    def prepare(self, env_name: str) -> None:
        """Build the environment now, so that its imports do not count against the first call's deadline."""
        self._environment(env_name)

    def score(self, env_name: str, problem: Problem, responses: Sequence[str]) -> list[float | None]:
        """One reward per response; NaN, inf and None are handed on. Its errors become RewardFailed."""
        environment = self._environment(env_name)

        def score_one(response: str) -> float | None:
            return as_number(environment.score(problem, response), f"environment {env_name!r}")

        return [_guarded(score_one, env_name, "score", problem, response) for response in responses]

    def is_correct(self, env_name: str, problem: Problem, responses: Sequence[str]) -> list[bool]:
        environment = self._environment(env_name)

        def judge_one(response: str) -> bool:
            return bool(environment.is_correct(problem, response))

        return [_guarded(judge_one, env_name, "is_correct", problem, response) for response in responses]

    def _environment(self, env_name: str) -> Environment:
        if env_name not in self._environments:
            if env_name not in self._blocks:
                raise ConfigError(f"env.{env_name} is missing; the recipe has {', '.join(self._blocks) or 'none'}")
            self._environments[env_name] = build_environment(env_name, self._blocks[env_name])
        return self._environments[env_name]


def _guarded[T](ask: Callable[[str], T], env_name: str, method: str, problem: Problem, response: str) -> T:
    try:
        return ask(response)
    except RewardFailed as error:
        raise RewardFailed(f"{error} (question {problem.question!r:.80}, response {response!r:.80})") from error
    except (Exception, SystemExit) as error:  # user code: any error becomes a typed one that carries its traceback
        raise RewardFailed(
            f"environment {env_name!r} raised {type(error).__name__} in {method}: {error}\n"
            f"question {problem.question!r:.200}, response {response!r:.200}\n{traceback.format_exc()}"
        ) from error
