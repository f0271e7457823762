"""The table of known buffer faults: operation scripts, prompt accounting at a save, buffer sizes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_grpo.config.derived import buffer_capacity
from megatron_grpo.config.schema import AsyncGrpo, Grpo
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.errors import EndOfData
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.types import Problem
from tests.fakes import make_group

FOLDER = Path(os.environ.get("MEGATRON_GRPO_CASES") or Path(__file__).parents[1] / "cases")
CASES = json.loads((FOLDER / "buffer_cases.json").read_text())


def select(key):
    return [pytest.param(case, id=case["id"]) for case in CASES if key in case]


class Script:
    """Runs a case's operations on the real buffer; names of the table <-> ordinals."""

    def __init__(self, case):
        prompts = [op[1] for op in case["ops"] if op[0] == "sample"]
        prompts += [op[2] for op in case["ops"] if op[0] in ("restore", "needed")]
        ages = [op[3] for op in case["ops"] if op[0] in ("sample", "needed")]
        ages += [op[4] for op in case["ops"] if op[0] == "restore"]
        self.ordinals: dict[str, int] = {}
        self.buffer = ReplayBuffer(
            capacity=case["max_size"],
            num_prompts_per_step=max(prompts, default=1),
            max_age=max(ages, default=1),
            sample_timeout_s=1,
            num_steps=10_000,
        )

    def group(self, name, version, target):
        return make_group(self.ordinals.setdefault(name, len(self.ordinals)), version, target)

    def names(self, groups):
        known = {ordinal: name for name, ordinal in self.ordinals.items()}
        return [known[group.ordinal] for group in groups]

    def add(self, name, version, target):
        return self.buffer.try_add(self.group(name, version, target))

    def sample(self, num_prompts, step, max_age):
        sampled = self.buffer.try_sample(step, num_prompts, max_age)
        if sampled is None:
            return None
        ages = [group.age for group in sampled.groups]
        return {"ids": self.names(sampled.groups), "avg_age": sum(ages) / len(ages)}

    def size(self):
        return self.buffer.size

    def watermark(self):
        return self.buffer.last_sampled

    def targets(self):
        return list(self.buffer.targets)

    def needed(self, target, num_prompts, max_age):
        return self.buffer.get_trajectories_needed(target, num_prompts, max_age)

    def restore(self, state, num_prompts, step, max_age):
        columns = (state["trajectories"], state["trajectory_versions"], state["target_weight_versions"])
        groups = [self.group(*row) for row in zip(*columns, strict=True)]
        kept = self.buffer.restore(groups, step).kept
        names = self.names(kept)
        return [[name, g.generation_version, g.target_step] for name, g in zip(names, kept, strict=True)]


@pytest.mark.parametrize("case", select("ops"))
def test_buffer_script(case):
    script = Script(case)
    answers = [getattr(script, operation)(*arguments) for operation, *arguments in case["ops"]]
    assert answers == case["expected"]


@pytest.mark.parametrize("case", select("accounting"))
def test_prompt_accounting(case):
    at_save, expected = case["accounting"], case["expected"]
    if not expected.get("aligned", True):
        pytest.skip("concerns the snapshot ring of iterable-only data")
    stream = one_epoch(at_save["n_prompts"])
    trained, buffered, in_flight, failed = (
        at_save.get(key, []) for key in ("trained", "buffered", "in_flight", "failed")
    )
    for _ in range(1 + max([*trained, *buffered, *in_flight, *failed], default=-1)):
        stream.next_prompt()
    stream.settle_trained(trained)
    for ordinal in failed:
        stream.settle_dropped(ordinal, "generation_failed")
    state = stream.state()
    assert (state.cut, state.frontier) == (expected["cut"], expected["frontier"])
    assert list(state.trained_above_cut) == expected["trained_at_or_above_cut"]
    resumed = one_epoch(at_save["n_prompts"])
    resumed.restore(state, held=buffered if at_save.get("load_buffer", True) else [])
    assert drain(resumed) == expected["stream"]


@pytest.mark.parametrize("case", select("max_trajectory_age_steps"))
def test_buffer_size(case):
    age = AsyncGrpo(enabled=True, max_trajectory_age_steps=case["max_trajectory_age_steps"])
    grpo = Grpo(num_prompts_per_step=case["num_prompts_per_step"], async_grpo=age)
    assert buffer_capacity(SimpleNamespace(grpo=grpo)) == case["expected"]


def one_epoch(num_rows):
    rows = [PromptRow(token_ids=(1,), env_name="fake", problem=Problem(question="", answer=""))] * num_rows
    return PromptStream(rows, num_prompts_per_step=1, seed=0, num_epochs=1, shuffle=False)


def drain(stream):
    ordinals = []
    while True:
        try:
            ordinals.append(stream.next_prompt().ordinal)
        except EndOfData:
            return ordinals
