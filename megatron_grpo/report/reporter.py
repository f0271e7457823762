"""The loop's reporter: one record per step to the metrics writer, one update to the display, facts for the summary."""

from __future__ import annotations

from collections.abc import Callable

from ..metrics import MetricsWriter, StepMetrics, Stopwatch, step_metrics
from ..metrics.step import AGE, LOSS, REWARD, TOKENS_PER_S, WAITED
from ..types import Collected, Sampled, ScoredBatch, TrainResult, ValidationResult
from .progress import Display, StepFacts
from .summary import RunHistory


class RunReporter:
    """Shows and records; never decides.

    `validation_due(num_finished_steps)` is the loop's own rule: the record of a step that will be validated waits for
    the result, so that a step is one record. `close` writes a record whose validation never came.
    """

    def __init__(
        self,
        *,
        writer: MetricsWriter,
        display: Display,
        history: RunHistory,
        validation_due: Callable[[int], bool],
    ):
        self._writer = writer
        self._display = display
        self._history = history
        self._validation_due = validation_due
        self._held: StepMetrics | None = None
        self._elapsed_s = 0.0  # of the steps of this run and the validations between them

    def step(
        self,
        step: int,
        *,
        sampled: Sampled,
        scored: ScoredBatch,
        trained: TrainResult,
        collected: Collected,
        clock: Stopwatch,
    ) -> None:
        """Report the 0-based `step`; reads the lap of `clock`."""
        seconds = clock.lap()
        record = step_metrics(
            step=step, sampled=sampled, scored=scored, trained=trained, seconds=seconds, collected=collected
        )
        self._history.rewards.append(record.values[REWARD])
        self._history.spent(seconds)
        self._elapsed_s += sum(seconds.values())
        self._display.step(self._facts(record))
        if self._validation_due(record.num_finished_steps):
            self._held = record
        else:
            self._writer.write(record)

    def validated(self, num_finished_steps: int, result: ValidationResult) -> None:
        held, self._held = self._held, None
        self._writer.write(StepMetrics.of_validation(result) if held is None else held.with_validation(result))
        self._history.validations.append(result)
        self._history.spent({"validation": result.seconds})
        self._elapsed_s += result.seconds if self._history.rewards else 0.0
        self._display.note(
            f"held-out exact {result.accuracy:.1%} of {result.num_samples} after step {num_finished_steps}, "
            f"reward {result.mean_reward:.3f}"
        )

    def close(self) -> None:
        if self._held is not None:
            self._writer.write(self._held)
            self._held = None

    def _facts(self, record: StepMetrics) -> StepFacts:
        history, values = self._history, record.values
        return StepFacts(
            num_finished_steps=record.num_finished_steps,
            num_steps=history.num_steps,
            reward=history.running_reward(),
            loss=values.get(LOSS, float("nan")),
            age=values[AGE],
            tokens_per_s=values[TOKENS_PER_S],
            waited_s=values[WAITED],
            left_s=self._elapsed_s / len(history.rewards) * (history.num_steps - record.num_finished_steps),
        )
