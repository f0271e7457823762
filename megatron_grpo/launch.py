"""Composition root: recipe in, run out. Modes are chosen here and in `assembly`, once.

    load and check the recipe, prepare the data   nothing has started: every complaint is a ConfigError, exit code 2
    lock the checkpoint directory, look for work  a finished run ends here; a cut-off one goes on where it was saved
    start Ray, the ranks, the collector, the loop under supervision (`assembly`): a dead part ends the run by name
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from .assembly import run_plan
from .backends import BackendFactory, load_backend
from .checkpoint.directory import CheckpointDirectory
from .checkpoint.lock import run_lock
from .checkpoint.outcome import Outcome, clear_outcome, write_outcome
from .config.derived import must_save_by_s
from .config.installed import vllm_fault
from .config.load import LoadedRecipe, load_recipe
from .config.rule_modes import SHIPPED_BACKENDS
from .config.rule_vllm import head_size_fault
from .config.schema import Recipe
from .config.yaml_source import to_yaml
from .errors import CheckpointError, ConfigError
from .layout import Layout
from .metrics import MetricsWriter
from .plan import Plan
from .platform.device import accelerator_for
from .ray_runtime.cluster import ray_cluster
from .report.console import log_through, open_console, say
from .report.progress import open_display
from .report.reporter import RunReporter
from .report.summary import RunHistory, format_summary
from .resume import find_resume
from .signals import until_signal
from .stopping import StopRequest
from .workload import prepare_workload

log = logging.getLogger(__name__)


def train(recipe_path: str, overrides: Sequence[str] = (), *, strict: bool = False) -> int:
    """Run a recipe to its end, or to a save that was asked for, and return 0.

    ConfigError: nothing was started. RunFailed, CheckpointError: a part ended the run. Interrupted: by a signal.
    """
    started = time.monotonic()
    loaded = load_recipe(recipe_path, overrides)
    recipe = loaded.recipe
    if refused := [*loaded.notes, *loaded.unreadable, *(loaded.ineffective if strict else ())]:
        raise ConfigError(refused)
    console = open_console()
    log_through(console)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    plan = _plan(loaded)
    with _own_log_dir(plan):
        if recipe.checkpointing.enabled:
            _train_with_checkpoints(plan, console, started)
        else:
            _train(plan, console, StopRequest(), started)
    return 0


def _own_log_dir(plan: Plan) -> ExitStack:
    """No second run writes there meanwhile. ConfigError: one does, or the directory cannot be written."""
    stack = ExitStack()
    checkpointing = plan.recipe.checkpointing
    if checkpointing.enabled and Path(checkpointing.checkpoint_dir).absolute() == Path(plan.log_dir):
        return stack  # its lock is the checkpoint directory's
    try:
        stack.enter_context(run_lock(Path(plan.log_dir), "logger.log_dir"))
    except CheckpointError as error:
        raise ConfigError(f"logger.log_dir: {error}") from error
    return stack


def _plan(loaded: LoadedRecipe) -> Plan:
    recipe = loaded.recipe
    return Plan(
        recipe=recipe,
        layout=Layout.from_recipe(recipe),
        workload=prepare_workload(recipe),
        log_dir=str(Path(recipe.logger.log_dir).absolute()),
        use_gpus=accelerator_for(recipe).is_cuda,
        external_backend=_external_backend(recipe),
        resolved_recipe=to_yaml(loaded.resolved),
    )


def _external_backend(recipe: Recipe) -> BackendFactory | None:
    name = recipe.policy.generation.backend
    if name == "vllm":
        _check_vllm(recipe)
    return None if name in SHIPPED_BACKENDS else load_backend(name)


def _check_vllm(recipe: Recipe) -> None:
    on_cuda = accelerator_for(recipe).is_cuda
    if faults := [fault for fault in (vllm_fault(), None if on_cuda else head_size_fault(recipe)) if fault]:
        raise ConfigError(faults)


def _train_with_checkpoints(plan: Plan, console: Console, started: float) -> None:
    """The lock is held and an outcome is left, whatever happens inside."""
    root = Path(plan.recipe.checkpointing.checkpoint_dir).absolute()
    with run_lock(root):
        directory = CheckpointDirectory(root)
        try:
            directory.prepare()
            clear_outcome(root)
            outcome = _resume_and_train(plan, directory, console, started)
        except BaseException as error:
            saved = max(directory.steps(), default=0)
            _record(root, Outcome(ending="failed", step=saved, requeue=False, reason=str(error)))
            raise
        _record(root, outcome)


def _resume_and_train(plan: Plan, directory: CheckpointDirectory, console: Console, started: float) -> Outcome:
    resume = find_resume(plan.recipe, plan.workload.train_rows, directory)
    num_steps = plan.workload.num_steps
    if resume is not None and resume.step >= num_steps:
        say(console, f"already complete: {resume.path} holds all {num_steps} steps")
        return Outcome(ending="finished", step=resume.step, requeue=False, reason="already complete")
    stop = StopRequest()
    plan = replace(plan, checkpoints=directory, resume=resume)
    step = _train(plan, console, stop, started)
    if stop.stop is None or step == num_steps:
        return Outcome(ending="finished", step=step, requeue=False)
    return Outcome(ending=stop.stop.ending, step=step, requeue=stop.stop.requeue, reason=stop.stop.reason)


def _record(root: Path, outcome: Outcome) -> None:
    """The run's own error, if there is one, must not give way to this one."""
    try:
        write_outcome(root, outcome)
    except CheckpointError as error:
        log.error("%s", error)


def _train(plan: Plan, console: Console, stop: StopRequest, started: float) -> int:
    """The number of finished steps."""
    logger, saves = plan.recipe.logger, plan.checkpoints is not None
    must_save_by = must_save_by_s(plan.recipe)
    left = None if must_save_by is None else must_save_by - (time.monotonic() - started)
    history = RunHistory(num_steps=plan.workload.num_steps, start_step=plan.start_step)
    wandb = logger.wandb.model_dump() if logger.wandb_enabled else None
    plain_reporter = partial(RunReporter, history=history, validation_due=plan.validation_due)
    with (
        MetricsWriter(
            plan.log_dir, start_step=plan.start_step, tensorboard=logger.tensorboard_enabled, wandb=wandb
        ) as writer,
        open_display(console) as display,
        closing(plain_reporter(writer=writer, display=display)) as reporter,
        ray_cluster(),
    ):
        work = run_plan(plan, display, reporter, stop)
        finished = asyncio.run(until_signal(work, stop, saves=saves, must_save_in_s=left))
    files = {"metrics": str(Path(plan.log_dir) / "metrics.jsonl"), "logs": plan.log_dir}
    if saves:
        files["checkpoints"] = str(plan.checkpoints.root)
    say(console, format_summary(history.summary(files)))
    return plan.start_step if finished is None else finished
