"""The names of what a checkpoint consists of, and `training.json`: how the run that saved it was set up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import CheckpointError

POLICY_NAME = "policy"
STREAM_STATE_NAME = "prompt_stream.json"
RECIPE_NAME = "recipe.yaml"
TRAINING_NAME = "training.json"
_PACKAGES = ("megatron_grpo", "megatron-core", "torch", "ray")
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecord:
    """`versions`: of the packages that wrote it, for the reader; nothing is decided by them."""

    step: int
    num_steps: int
    num_prompts_per_step: int
    num_generations_per_prompt: int
    versions: dict[str, str]

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION} | asdict(self), indent=1) + "\n"


def read_training_record(checkpoint: Path) -> TrainingRecord:
    """Raises CheckpointError naming the file and what is wrong with it."""
    path = checkpoint / TRAINING_NAME
    try:
        record = json.loads(path.read_text())
        found = record.pop("format_version")
        if found != FORMAT_VERSION:
            raise CheckpointError(f"{path} has format version {found!r}; this release reads {FORMAT_VERSION}")
        return TrainingRecord(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
