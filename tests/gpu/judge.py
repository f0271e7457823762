"""Prints what a GPU run measured and judges its log-prob checks. Reads metrics.jsonl with the standard library only."""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Bounds on steps that trained only fresh groups (age 0); half precision rounds where trainer and engine differ.
BOUNDS = {
    "float32": {"train/gen_kl_error": 1e-5, "train/token_mult_prob_error": 1.001},
    "bfloat16": {"train/gen_kl_error": 1e-2, "train/token_mult_prob_error": 1.05},
}
MIN_REWARD = 0.8


def judge(records: Sequence[Mapping[str, float | None]], precision: str) -> tuple[list[str], list[str]]:
    """(what was measured, what failed); both are lines of text."""
    steps = [record for record in records if "train/loss" in record]
    if not steps:
        return [], ["no step was trained"]
    # The first step pays for compilation and allocation.
    speeds = [record["performance/generated_tokens_per_s"] for record in steps[1:] or steps]
    measured = [f"steps {len(steps)}, median {statistics.median(speeds):,.0f} generated tokens/s"]
    failed = []
    fresh = [record for record in steps if record["train/max_trajectory_age"] == 0]
    if not fresh:
        failed.append("no step trained only fresh groups: the log-prob checks judged nothing")
    for name, bound in BOUNDS[precision].items():
        worst = max((_number(record.get(name)) for record in fresh), default=math.nan)
        everywhere = max(_number(record.get(name)) for record in steps)
        measured.append(f"{name}: largest {worst:.3g} on {len(fresh)} fresh steps (bound {bound:g}), {everywhere:.3g} on all")
        if fresh and worst > bound:
            failed.append(f"{name} is {worst:.3g}, more than {bound:g}")
    last = steps[-max(1, len(steps) // 10) :]
    reward = statistics.fmean(_number(record["train/reward"]) for record in last)
    measured.append(f"reward {_number(steps[0]['train/reward']):.3f} -> {reward:.3f} (mean of the last {len(last)} steps)")
    if not MIN_REWARD <= reward < math.inf:
        failed.append(f"the reward ends at {reward:.3f}, less than {MIN_REWARD}")
    return measured, failed


def _number(value: float | None) -> float:
    """A null stands for NaN or infinity and is worse than every bound."""
    return math.inf if value is None else value


def main(path: str, *overrides: str) -> int:
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    precision = "bfloat16" if "policy.precision=bfloat16" in overrides else "float32"
    measured, failed = judge(records, precision)
    verdict = [f"FAILED {line}" for line in failed] or ["every check passed"]
    print("\n".join([*measured, *verdict]))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
