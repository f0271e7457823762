"""Step time of asynchronous against synchronous training, real runs of sort3, with rollouts slowed by a knob.

    python -m benchmarks.async_overlap [--ratios 0.5 1 2] [--steps 24]

The knob is an environment that sleeps in `score`, so that a step's rollouts take Tgen. Ttrain is everything else in a
synchronous step (log-probs, updates, weight transfer). A loop that overlaps perfectly takes max(Tgen, Ttrain) where the
synchronous one takes Tgen + Ttrain; the table shows how close the async loop comes to that limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.rollout.environments import SortDigits
from megatron_grpo.types import Problem

RECIPE = "recipes/llm/grpo-sort3-1n2g-megatron_async.yaml"
NUM_PROMPTS, NUM_GENERATIONS, NUM_WORKERS = 8, 8, 4
SKIPPED = 4  # first steps: warm-up of caches and of the pipeline
COMMON = (
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    # Few trajectories and many updates: two cores are not the limit, and training is long enough to hide behind.
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    "policy.train_global_batch_size=2",
    "policy.train_micro_batch_size=2",
    "env.sort_digits.target=benchmarks.async_overlap:SlowSortDigits",
    f"env.sort_digits.num_workers={NUM_WORKERS}",
)


class SlowSortDigits(SortDigits):
    """Sleeps `delay_s` for every response it scores."""

    def __init__(self, delay_s: float = 0.0, **options):
        super().__init__(**options)
        self._delay_s = delay_s

    def score(self, problem: Problem, response: str) -> float:
        time.sleep(self._delay_s)
        return super().score(problem, response)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Medians over the measured steps, seconds."""

    step_s: float
    waited_s: float

    @property
    def rest_s(self) -> float:
        return self.step_s - self.waited_s


def run(*, is_async: bool, delay_s: float, num_steps: int) -> StepTimes:
    with tempfile.TemporaryDirectory() as log_dir:
        settings = [
            *COMMON,
            f"grpo.max_num_steps={num_steps}",
            f"grpo.async_grpo.enabled={str(is_async).lower()}",
            f"env.sort_digits.delay_s={delay_s:.6f}",
            f"logger.log_dir={log_dir}",
        ]
        command = [sys.executable, "-m", "megatron_grpo", "train", RECIPE, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(log_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][SKIPPED:]
    return StepTimes(
        step_s=statistics.median(step["timing/train/total_step_time"] for step in steps),
        waited_s=statistics.median(step["timing/train/wait_for_groups"] for step in steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="wanted Tgen / Ttrain")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    plain = run(is_async=False, delay_s=0.0, num_steps=arguments.steps)
    print(f"without delay: Tgen {plain.waited_s:.3f} s, Ttrain {plain.rest_s:.3f} s")
    print("wanted ratio    Tgen  Ttrain    sync   async   async/sync   limit   above the limit")
    for ratio in arguments.ratios:
        delay_s = max(0.0, ratio * plain.rest_s - plain.waited_s) * NUM_WORKERS / (NUM_PROMPTS * NUM_GENERATIONS)
        sync = run(is_async=False, delay_s=delay_s, num_steps=arguments.steps)
        overlapped = run(is_async=True, delay_s=delay_s, num_steps=arguments.steps)
        reached, limit = overlapped.step_s / sync.step_s, max(sync.waited_s, sync.rest_s) / sync.step_s
        print(
            f"{ratio:12.2f} {sync.waited_s:7.3f} {sync.rest_s:7.3f} {sync.step_s:7.3f} {overlapped.step_s:7.3f} "
            f"{reached:12.3f} {limit:7.3f} {reached / limit - 1:16.1%}"
        )


if __name__ == "__main__":
    main()
