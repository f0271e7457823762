"""Reads the arrays and options of a loss table: the notation of the table in, the package's types out."""

import json
import os
from pathlib import Path

import numpy as np
import torch

from megatron_grpo.algorithms.loss import LossConfig, LossInputs

DTYPES = {"float64": torch.float64, "float32": torch.float32}
OWN = Path(__file__).parents[1] / "cases"


def read_cases() -> list[dict]:
    """The table named by MEGATRON_GRPO_CASES (or ours), and our own rows for kinds it may lack. Options are merged."""
    cases = []
    handed = Path(os.environ.get("MEGATRON_GRPO_CASES", OWN)) / "loss_fixtures.json"
    for path in (handed, OWN / "loss_fixtures_own.json"):
        table = json.loads(path.read_text())
        for case in table["fixtures"]:
            options = case.get("config", {}) | case["inputs"].get("config", {})
            cases.append(case | {"options": table["defaults"] | options})
    return cases


def config_of(options: dict) -> LossConfig:
    """Public names, and the two internal levels; `sequence_level_importance_ratios` sets both."""
    options = dict(options)
    if options.pop("sequence_level_importance_ratios", False):
        options |= {"is_level": "sequence", "ratio_level": "sequence"}
    return LossConfig(**options)


def numbers(nested) -> list[float]:
    """Flattened; "NaN" and "-Infinity" are numbers too, and None is NaN."""
    if isinstance(nested, list):
        return [x for item in nested for x in numbers(item)]
    return [float("nan") if nested is None else float(nested)]


def array(nested) -> np.ndarray:
    return np.array(numbers(nested)).reshape(np.shape(nested))


def valid_of(batch: dict) -> np.ndarray:
    return (array(batch["token_mask"]) > 0) & (array(batch["sample_mask"])[:, None] > 0)


def counts_of(batch: dict) -> tuple[int, int]:
    valid = valid_of(batch)
    return int(valid.sum()), int(valid.any(1).sum())


def loss_inputs(batch: dict, dtype: torch.dtype) -> LossInputs:
    def tensor(name):
        return torch.tensor(array(batch[name]), dtype=dtype) if batch.get(name) is not None else None

    return LossInputs(
        current_logprobs=tensor("curr").requires_grad_(),
        old_logprobs=tensor("prev"),
        generation_logprobs=tensor("gen"),
        reference_logprobs=tensor("ref"),
        advantages=tensor("adv"),
        token_mask=tensor("token_mask"),
        sample_mask=tensor("sample_mask"),
        entropy=tensor("entropy"),
        segment_ids=torch.tensor(batch["segment_ids"]) if "segment_ids" in batch else None,
    )


def batches_in(inputs: dict) -> list[dict]:
    """The parts of a case: a list of batches under any name, or batches under names of their own, in order."""
    for value in inputs.values():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return value
    return [value for value in inputs.values() if isinstance(value, dict) and "curr" in value]
