"""All that is known about a run before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from .backends import BackendFactory
from .checkpoint.contents import RECIPE_NAME, TRAINING_NAME, TrainingRecord, package_versions
from .checkpoint.directory import CheckpointDirectory
from .config.schema import Recipe
from .layout import Layout
from .resume import Resume
from .workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Immutable; the composition root reads it."""

    recipe: Recipe
    layout: Layout
    workload: Workload
    log_dir: str
    use_gpus: bool
    external_backend: BackendFactory | None  # None: Megatron's engine or vLLM generates
    resolved_recipe: str  # YAML
    checkpoints: CheckpointDirectory | None = None  # None: the run saves nothing
    resume: Resume | None = None  # None: a fresh run

    @property
    def start_step(self) -> int:
        return 0 if self.resume is None else self.resume.step

    def validation_due(self, num_finished: int) -> bool:
        grpo, last = self.recipe.grpo, self.workload.num_steps
        if not self.workload.validation_rows:
            return False
        if num_finished in (0, last):
            return grpo.val_at_start if num_finished == 0 else grpo.val_at_end or _divides(grpo.val_period, last)
        return _divides(grpo.val_period, num_finished)

    def documents(self, step: int) -> dict[str, str]:
        """The small files of checkpoint `step`, by name."""
        record = TrainingRecord(
            step=step,
            num_steps=self.workload.num_steps,
            num_prompts_per_step=self.recipe.grpo.num_prompts_per_step,
            num_generations_per_prompt=self.recipe.grpo.num_generations_per_prompt,
            versions=package_versions(),
        )
        return {RECIPE_NAME: self.resolved_recipe, TRAINING_NAME: record.to_json()}


def _divides(period: int, number: int) -> bool:
    return period > 0 and number % period == 0
